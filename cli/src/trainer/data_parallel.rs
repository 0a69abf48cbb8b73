//! Training strategies: data parallelism (DDP), and a single process.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError};

use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use comm::{Communicator, Stats};
use ddp::Ddp;
use ops::activation_bytes;
use report::counted;
use report::metrics::MemoryUse;
use strategy::DistributedModel;
use strategy::checkpoint::{MODEL, OPTIMIZER};
use training::{Checkpoint, Checkpoints, OptimizerState, named_vars};

use crate::error::Result;
use crate::held::{bytes, gradient_bytes};

use super::checkpoint_mismatch;
use super::{CheckpointForm, Position, Sets, StepRandom, Strategy, Whole};

/// A data-parallel model with its optimizer and its loss.
pub struct DataParallel<M, B, O, L> {
    ddp: Ddp<M>,
    optimizer: O,
    loss: L,
    batch: PhantomData<fn(&B)>,
    /// All variables of the model, including buffers.
    vars: VarMap,
    /// Random generator of the steps, and this rank's number.
    random: Option<(StepRandom, usize)>,
    /// Bytes of activations and of gradients, measured in the first step.
    first: Option<(u64, u64)>,
    /// Bytes sent in steps so far.
    sent: u64,
    latest: Option<(Position, Tensor)>,
}

impl<M, B, O, L> DataParallel<M, B, O, L>
where
    O: Optimizer + OptimizerState,
    L: Fn(&M, &B) -> candle_core::Result<Tensor>,
{
    /// `loss` computes the loss of the model (`&M`) on a batch (`&B`); `vars` has all variables of the model,
    /// including buffers.
    pub fn new(ddp: Ddp<M>, optimizer: O, loss: L, vars: &VarMap) -> Self {
        let (vars, batch) = (vars.clone(), PhantomData);
        Self { ddp, optimizer, loss, batch, vars, random: None, first: None, sent: 0, latest: None }
    }

    /// Sets the generator that steps draw from (for dropout, for example), and the rank number that seeds it.
    #[must_use]
    pub fn drawing(self, random: Option<StepRandom>, rank: usize) -> Self {
        Self { random: random.map(|random| (random, rank)), ..self }
    }

    /// Returns the data-parallel model.
    pub fn ddp(&self) -> &Ddp<M> {
        &self.ddp
    }
}

impl<M, B, O, L> Strategy for DataParallel<M, B, O, L>
where
    O: Optimizer + OptimizerState,
    L: Fn(&M, &B) -> candle_core::Result<Tensor>,
{
    type Batch = B;

    fn name(&self, world_size: usize) -> String {
        format!("DDP, {}", counted(world_size, "rank"))
    }

    fn step(&mut self, at: Position, batch: &B) -> Result<Option<Tensor>> {
        if let Some((random, rank)) = &self.random {
            random.begin(*rank, at.step);
        }
        let loss = tracing::info_span!("forward")
            .in_scope(|| Ok::<_, ddp::Error>((self.loss)(self.ddp.model()?, batch)));
        let loss = loss??;
        let activations = match self.first {
            Some((activations, _)) => activations,
            None => {
                let copies = self.ddp.parameters().iter().map(|parameter| parameter.tensor());
                activation_bytes(&loss, copies) as u64
            }
        };
        self.latest = Some((at, loss.detach()));
        let sent = self.ddp.stats().bytes_sent;
        let grads = self.ddp.backward(&loss)?;
        self.sent += self.ddp.stats().bytes_sent - sent;
        if self.first.is_none() {
            self.first = Some((activations, gradient_bytes(&self.ddp.vars(), &grads)));
        }
        tracing::info_span!("optimizer").in_scope(|| self.optimizer.step(&grads))?;
        Ok(Some(loss))
    }

    fn held(&self) -> Result<MemoryUse> {
        let parameters = self.ddp.parameters();
        let (activations, gradients) = self.first.unwrap_or_default();
        Ok(MemoryUse {
            weights: bytes(named_vars(&self.vars).iter().map(|(_, var)| var.as_tensor())),
            copies: bytes(parameters.iter().map(|parameter| parameter.tensor())),
            gradients,
            optimizer: bytes(self.optimizer.state()?.iter().map(|(_, tensor)| tensor)),
            activations,
            sent: 0.0,
        })
    }

    fn stats(&self) -> Stats {
        Stats { bytes_sent: self.sent, ..Stats::default() }
    }

    fn kept(&mut self) -> CheckpointForm<'_> {
        CheckpointForm::Whole(self)
    }
}

impl<M, B, O, L> Whole for DataParallel<M, B, O, L>
where
    O: Optimizer + OptimizerState,
{
    fn tensors(&self) -> Result<Sets> {
        let vars = self.vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        let vars = vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
        Ok(Sets::from([
            (MODEL.to_string(), vars),
            (OPTIMIZER.to_string(), self.optimizer.state()?.into_iter().collect()),
        ]))
    }

    fn save(&self, to: &Checkpoints, mut checkpoint: Checkpoint) -> Result<()> {
        checkpoint.tensors.retain(|name, _| ![MODEL, OPTIMIZER].contains(&name.as_str()));
        self.ddp.save_alone(to, Some(&self.optimizer), &checkpoint)?;
        Ok(())
    }

    fn set(&mut self, sets: &Sets) -> Result<()> {
        let model = sets.get(MODEL).ok_or_else(|| checkpoint_mismatch("it holds no model".to_string()))?;
        set_all(&self.vars, model)?;
        Ok(self.optimizer.load_state(sets.get(OPTIMIZER).unwrap_or(&HashMap::new()))?)
    }

    fn regroup(&mut self, comm: Arc<dyn Communicator>) -> Result<()> {
        if let Some((_, rank)) = &mut self.random {
            *rank = comm.rank();
        }
        Ok(self.ddp.regroup(comm)?)
    }

    fn check(&self) -> Result<()> {
        Ok(self.ddp.check_parameters()?)
    }

    fn latest(&self) -> Option<&(Position, Tensor)> {
        self.latest.as_ref()
    }
}

/// Sets every variable to its saved value, if all fit; otherwise changes nothing.
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
                return Err(checkpoint_mismatch(format!(
                    "its tensor `{name}` is {saved}, the model's is {own}"
                )));
            }
            (Some(_), None) => return Err(checkpoint_mismatch(format!("it has no tensor `{name}`"))),
            (None, _) => {
                return Err(checkpoint_mismatch(format!(
                    "it has a tensor `{name}`, which the model has not"
                )));
            }
        }
    }
    pairs.into_iter().try_for_each(|(var, value)| var.set(&value.to_device(var.device())?))?;
    Ok(())
}

fn describe(tensor: &Tensor) -> String {
    format!("{:?} {:?}", tensor.dtype(), tensor.dims())
}

/// Single-process training; `step` takes a batch, updates the model and returns the loss.
pub struct SingleProcess<B, F> {
    step: F,
    batch: PhantomData<fn(&B)>,
}

impl<B, F: FnMut(&B) -> Result<Tensor>> SingleProcess<B, F> {
    /// Creates the strategy with this step.
    pub fn new(step: F) -> Self {
        Self { step, batch: PhantomData }
    }
}

impl<B, F: FnMut(&B) -> Result<Tensor>> Strategy for SingleProcess<B, F> {
    type Batch = B;

    fn step(&mut self, _: Position, batch: &B) -> Result<Option<Tensor>> {
        (self.step)(batch).map(Some)
    }
}
