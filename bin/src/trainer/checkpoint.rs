//! What a checkpoint keeps of a trainer, and how a trainer goes on from it.

use std::collections::{BTreeMap, HashMap};
use std::sync::PoisonError;

use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use sampler::Dataset;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::{Checkpoint, OptimizerState};

use crate::error::{Error, Result};
use crate::run_log::{LogState, RunLog};

use super::{Keeper, Observer, Position, RunIdentity, Trainer};

const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
const LOG: &str = "log";
const LOSSES: &str = "losses";

/// What is no tensor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Extra {
    pub(super) run: RunIdentity,
    pub(super) batch: usize,
    observer: Value,
    log: LogState,
}

impl Extra {
    /// Reads it back.
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        serde_json::from_value(checkpoint.extra.clone())
            .map_err(|reason| misfit(format!("it was not written by this program: {reason}")))
    }
}

impl<M, D, B, O, L> Trainer<M, D, B, O, L>
where
    D: Dataset + 'static,
    B: Send + 'static,
    O: Optimizer + OptimizerState,
    L: Fn(&M, &B) -> candle_core::Result<Tensor>,
{
    /// Writes a checkpoint, this rank having taken so many samples since the epoch began or was resumed.
    pub(super) fn save(
        &mut self,
        taken: usize,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Some(keeper) = self.keeper.take() else { return Ok(()) };
        let _span = tracing::info_span!("checkpoint").entered();
        let checkpoint = self.snapshot((&keeper.vars, &keeper.run), taken, log, observer)?;
        keeper.checkpoints.save(&checkpoint)?;
        self.keeper = Some(Keeper { kept: Some(self.at.step), ..keeper });
        Ok(())
    }

    /// What a checkpoint keeps, of now; the tensors are the variables themselves, not copies.
    pub(super) fn snapshot(
        &self,
        (vars, run): (&VarMap, &RunIdentity),
        taken: usize,
        log: Option<&mut RunLog<'_>>,
        observer: &dyn Observer,
    ) -> Result<Checkpoint> {
        let sampler = serde_json::to_value(self.sampler_state(taken)).map_err(unwritable)?;
        let mut tensors = BTreeMap::from([
            (MODEL.to_string(), tensors_of(vars)),
            (OPTIMIZER.to_string(), self.optimizer.state()?.into_iter().collect()),
        ]);
        let mut state = LogState::default();
        if let Some(log) = log {
            // The metrics must not lack a step that will not be done again.
            log.flush()?;
            let (of_log, losses) = log.state();
            state = of_log;
            let losses = Tensor::new(losses, &candle_core::Device::Cpu)?;
            tensors.insert(LOG.to_string(), [(LOSSES.to_string(), losses)].into());
        }
        let Position { epoch, batch, step } = self.at;
        let extra = Extra { run: run.clone(), batch, observer: observer.state(), log: state };
        let extra = serde_json::to_value(extra).map_err(unwritable)?;
        Ok(Checkpoint { epoch: epoch as u64, step: step as u64, sampler, extra, tensors })
    }

    /// Goes on from a checkpoint: variables, optimizer, place in the data, observer and log become what they were. To be called
    /// on every rank, before training.
    ///
    /// # Errors
    /// A checkpoint of another model, optimizer or data set; with the model's variables unchanged where these do not fit.
    pub fn restore(
        &mut self,
        checkpoint: &Checkpoint,
        vars: &VarMap,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Extra { batch, observer: observed, log: logged, .. } = Extra::of(checkpoint)?;
        let set = |name: &str| checkpoint.tensors.get(name);
        let model = set(MODEL).ok_or_else(|| misfit("it holds no model".to_string()))?;
        let sampler = serde_json::from_value(checkpoint.sampler.clone())
            .map_err(|reason| misfit(format!("its sampler's state cannot be read: {reason}")))?;
        self.loader.sampler_mut().resume(&sampler)?;
        set_all(vars, model)?;
        self.optimizer.load_state(set(OPTIMIZER).unwrap_or(&HashMap::new()))?;
        self.at = Position { epoch: checkpoint.epoch as usize, batch, step: checkpoint.step as usize };
        observer.load_state(&observed);
        let Some(log) = log else { return Ok(()) };
        let losses = set(LOG).and_then(|log| log.get(LOSSES)).map(Tensor::to_vec1::<f32>).transpose()?;
        log.resume(self.at.step, logged, losses.unwrap_or_default());
        Ok(())
    }
}

/// All variables, as they are now: not copies.
fn tensors_of(vars: &VarMap) -> HashMap<String, Tensor> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect()
}

/// Gives every variable its saved value, if all fit.
fn set_all(vars: &VarMap, saved: &HashMap<String, Tensor>) -> Result<()> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let mut names: Vec<&String> = vars.keys().chain(saved.keys()).collect();
    names.sort();
    names.dedup();
    let mut pairs: Vec<(&Var, &Tensor)> = Vec::with_capacity(names.len());
    for name in names {
        match (vars.get(name), saved.get(name)) {
            (Some(var), Some(value)) if var.shape() == value.shape() && var.dtype() == value.dtype() => {
                pairs.push((var, value));
            }
            (Some(var), Some(value)) => {
                let (own, saved) = (describe(var), describe(value));
                return Err(misfit(format!("its tensor `{name}` is {saved}, the model's is {own}")));
            }
            (Some(_), None) => return Err(misfit(format!("it has no tensor `{name}`"))),
            (None, _) => return Err(misfit(format!("it has a tensor `{name}`, which the model has not"))),
        }
    }
    pairs.into_iter().try_for_each(|(var, value)| var.set(&value.to_device(var.device())?))?;
    Ok(())
}

fn describe(tensor: &Tensor) -> String {
    format!("{:?} {:?}", tensor.dtype(), tensor.dims())
}

fn misfit(problem: String) -> Error {
    Error::Checkpoint { problem }
}

fn unwritable(reason: serde_json::Error) -> Error {
    Error::Checkpoint { problem: format!("its state cannot be written: {reason}") }
}
