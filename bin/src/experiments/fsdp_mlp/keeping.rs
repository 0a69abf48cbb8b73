//! Checkpoints of the run: each rank writes and reads its own part.

use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};
use comm::broadcast_object;
use fsdp::{LossScaler, LossScalerState};
use serde::{Deserialize, Serialize};
use training::{Checkpoint, Contents};

use crate::console::note;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::run_log::{LogState, RunLog};
use crate::trainer::{CheckpointOptions, RunIdentity, agree, offer};

use super::step::Trainee;

const LOG: &str = "log";
const LOSSES: &str = "losses";

/// What a checkpoint keeps beside tensors.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    run: RunIdentity,
    log: LogState,
    #[serde(default)]
    scale: Option<LossScalerState>,
}

/// The checkpoint that a run is to go on from, if it is to and there is one.
pub(super) fn find(options: &CheckpointOptions, run: &RunIdentity) -> Result<Option<Contents>> {
    let (Some(wanted), Some(checkpoints)) = (options.wanted(), options.open()?) else { return Ok(None) };
    let found = match wanted {
        Some(folder) => Some(checkpoints.contents(&folder).map_err(offer)?),
        None => checkpoints.latest().map_err(offer)?,
    };
    if let Some(contents) = &found {
        let kept: Kept = kept(contents.extra.get("extra"))?;
        agree(run, &kept.run, options)?;
    }
    Ok(found)
}

fn kept(value: Option<&serde_json::Value>) -> Result<Kept> {
    let misfit = |problem: String| Error::Checkpoint { problem };
    let value = value.ok_or_else(|| misfit("it is of no sharded run".into()))?;
    serde_json::from_value(value.clone())
        .map_err(|reason| misfit(format!("it was not written by this program: {reason}")))
}

/// A run and its checkpoints.
pub(super) struct Keeping<'a> {
    pub(super) options: &'a CheckpointOptions,
    pub(super) run: RunIdentity,
    /// The step of the last checkpoint.
    pub(super) kept: Option<usize>,
}

impl Keeping<'_> {
    /// Goes on from a checkpoint, if that is asked for: the step that comes next. To be called on every rank.
    pub(super) fn resume(
        &mut self,
        rank: &Rank,
        trainee: &mut Trainee,
        log: Option<&mut RunLog<'_>>,
    ) -> Result<usize> {
        let (Some(_), Some(checkpoints)) = (self.options.wanted(), self.options.open()?) else {
            return Ok(0);
        };
        // Rank 0's choice, so that all take the same.
        let own = if rank.is_first() { find(self.options, &self.run)? } else { None };
        let folder: Option<PathBuf> = broadcast_object(&*rank.comm, &own.map(|contents| contents.folder), 0)?;
        let dir = self.options.dir().display();
        let Some(folder) = folder else {
            if let Some(log) = log {
                note(format_args!("no checkpoint in {dir} yet: starting from the beginning"));
                log.cut(0, 0)?;
            }
            return Ok(0);
        };
        let contents = checkpoints.contents(&folder).map_err(offer)?;
        let Trainee { fsdp, optimizer, scaler } = trainee;
        let extra = fsdp.load_checkpoint(&contents, Some(optimizer))?;
        let Kept { run, log: state, scale } = kept(Some(&extra))?;
        if let (Some(scaler), Some(scale)) = (scaler, scale) {
            scaler.resume(scale);
        }
        let step = contents.step as usize;
        self.kept = Some(step);
        let Some(log) = log else { return Ok(step) };
        let losses = safetensors::load(contents.path(LOG), &Device::Cpu)?;
        let losses = losses.get(LOSSES).map(Tensor::to_vec1::<f32>).transpose()?;
        log.resume(step, state, losses.unwrap_or_default());
        log.cut(0, step)?;
        let (then, now) = (run.world_size, self.run.world_size);
        let dealt = match then == now {
            true => String::new(),
            false => format!("; it was made with world size {then}, so the data are others from here on"),
        };
        note(format_args!("going on from {dir} at step {step}{dealt}"));
        Ok(step)
    }

    /// Writes a checkpoint after so many steps, if one is due or these are all. To be called on every rank.
    pub(super) fn keep(
        &mut self,
        (step, is_last): (usize, bool),
        trainee: &Trainee,
        log: Option<&mut RunLog<'_>>,
    ) -> Result<()> {
        let Some(checkpoints) = self.options.open()? else { return Ok(()) };
        let due = self.options.checkpoint_every.is_some_and(|every| step.is_multiple_of(every));
        if self.kept == Some(step) || !(due || is_last) {
            return Ok(());
        }
        let _span = tracing::info_span!("checkpoint").entered();
        let scale = trainee.scaler.as_ref().map(LossScaler::state);
        let mut kept = Kept { run: self.run.clone(), log: LogState::default(), scale };
        let mut checkpoint = Checkpoint { step: step as u64, ..Checkpoint::default() };
        if let Some(log) = log {
            // The metrics must not lack a step that will not be done again.
            log.flush()?;
            let (state, losses) = log.state();
            kept.log = state;
            let losses = [(LOSSES.to_string(), Tensor::new(losses, &Device::Cpu)?)].into();
            checkpoint.tensors.insert(LOG.to_string(), losses);
        }
        checkpoint.extra = serde_json::to_value(kept).map_err(|reason| Error::Checkpoint {
            problem: format!("its state cannot be written: {reason}"),
        })?;
        trainee.fsdp.save_checkpoint(&checkpoints, Some(&trainee.optimizer), &checkpoint)?;
        self.kept = Some(step);
        Ok(())
    }
}
