//! Checkpoints of the run: each rank writes and reads its own stages.

use std::path::PathBuf;

use candle_core::{Device, Tensor, safetensors};
use comm::broadcast_object;
use pipeline::Pipeline;
use serde::{Deserialize, Serialize};
use training::{Checkpoint, Contents, Sgd};

use crate::console::note;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::run_log::{LogState, RunLog};
use crate::trainer::{CheckpointOptions, RunIdentity, agree, offer};

const LOG: &str = "log";
const LOSSES: &str = "losses";

/// What a checkpoint keeps beside tensors.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    run: RunIdentity,
    log: LogState,
}

/// The checkpoint that a run is to go on from, if it is to and there is one.
fn find(options: &CheckpointOptions, run: &RunIdentity) -> Result<Option<Contents>> {
    let (Some(wanted), Some(checkpoints)) = (options.wanted(), options.open()?) else { return Ok(None) };
    let found = match wanted {
        Some(folder) => Some(checkpoints.contents(&folder).map_err(offer)?),
        None => checkpoints.latest().map_err(offer)?,
    };
    if let Some(contents) = &found {
        let kept = contents.extra.get("extra");
        let kept = kept.ok_or_else(|| Error::Checkpoint { problem: "it is of no pipeline".into() })?;
        agree(run, &read(kept)?.run, options)?;
    }
    Ok(found)
}

/// Whether that checkpoint can be trusted, before any rank is started.
pub(super) fn check(options: &CheckpointOptions, run: &RunIdentity) -> Result<()> {
    let Some(contents) = find(options, run)? else { return Ok(()) };
    contents.files.keys().try_for_each(|name| contents.check(name).map_err(offer))
}

fn read(value: &serde_json::Value) -> Result<Kept> {
    serde_json::from_value(value.clone()).map_err(|reason| Error::Checkpoint {
        problem: format!("it was not written by this program: {reason}"),
    })
}

/// A run and its checkpoints.
pub(super) struct Keeping<'a> {
    pub(super) options: &'a CheckpointOptions,
    pub(super) run: RunIdentity,
    pub(super) steps_per_epoch: usize,
    /// The rank that has the log.
    pub(super) reporter: usize,
    /// The step of the last checkpoint.
    pub(super) kept: Option<usize>,
}

impl Keeping<'_> {
    /// Goes on from a checkpoint, if that is asked for: the step that comes next. To be called on every rank.
    pub(super) fn resume(
        &mut self,
        rank: &Rank,
        pipeline: &Pipeline,
        optimizer: &mut Sgd,
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
        let Kept { run, log: state } = read(&pipeline.load_checkpoint(&contents, Some(optimizer))?)?;
        let step = contents.step as usize;
        self.kept = Some(step);
        let Some(log) = log else { return Ok(step) };
        let losses = safetensors::load(contents.path(LOG), &Device::Cpu)?;
        let losses = losses.get(LOSSES).map(Tensor::to_vec1::<f32>).transpose()?;
        log.resume(step, state, losses.unwrap_or_default());
        let (epoch, batch) = (step / self.steps_per_epoch, step % self.steps_per_epoch);
        log.cut(epoch, batch)?;
        let (then, now) = (run.world_size, self.run.world_size);
        let cut = match then == now {
            true => String::new(),
            false => format!("; it was made with world size {then}, the model is cut anew"),
        };
        note(format_args!("going on from {dir} at epoch {epoch}, batch {batch} (step {step}){cut}"));
        Ok(step)
    }

    /// Writes a checkpoint after so many steps, if one is due or these are all. To be called on every rank.
    pub(super) fn keep(
        &mut self,
        (step, is_last): (usize, bool),
        rank: &Rank,
        pipeline: &Pipeline,
        optimizer: &Sgd,
        log: Option<&mut RunLog<'_>>,
    ) -> Result<()> {
        let Some(checkpoints) = self.options.open()? else { return Ok(()) };
        let every = self.options.checkpoint_every.unwrap_or(self.steps_per_epoch);
        if self.kept == Some(step) || !(step.is_multiple_of(every) || is_last) {
            return Ok(());
        }
        let _span = tracing::info_span!("checkpoint").entered();
        let (epoch, step_count) = (step / self.steps_per_epoch, step as u64);
        let mut checkpoint = Checkpoint { epoch: epoch as u64, step: step_count, ..Checkpoint::default() };
        let mut state = LogState::default();
        if let Some(log) = log {
            // The metrics must not lack a step that will not be done again.
            log.flush()?;
            let (now, losses) = log.state();
            state = now;
            let losses = [(LOSSES.to_string(), Tensor::new(losses, &Device::Cpu)?)].into();
            checkpoint.tensors.insert(LOG.to_string(), losses);
        }
        let log = broadcast_object(&*rank.comm, &state, self.reporter)?;
        let kept = Kept { run: self.run.clone(), log };
        checkpoint.extra = serde_json::to_value(kept).map_err(|reason| Error::Checkpoint {
            problem: format!("its state cannot be written: {reason}"),
        })?;
        pipeline.save_checkpoint(&checkpoints, Some(optimizer), &checkpoint)?;
        self.kept = Some(step);
        Ok(())
    }
}
