//! Checkpoints of a run on a mesh: each rank writes and reads its own part.

use sampler::SamplerState;
use serde::{Deserialize, Serialize};
use training::Contents;

use crate::error::{Error, Result};
use crate::options::offer;
use crate::rank::Rank;
use crate::run_log::RunLog;
use crate::trainer::parts::{Keeping, Kept};

use super::run::{Job, Task};

/// What a checkpoint keeps beside tensors and what all runs keep.
#[derive(Debug, Serialize, Deserialize)]
struct Own {
    batch: usize,
}

/// Where a run stands: what comes next.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Position {
    pub(super) epoch: usize,
    pub(super) batch: usize,
    pub(super) step: usize,
}

/// How far a checkpoint is in the data.
pub(super) fn state(contents: &Contents) -> Result<SamplerState> {
    serde_json::from_value(contents.sampler.clone()).map_err(|reason| Error::Checkpoint {
        problem: format!("its sampler's state cannot be read: {reason}"),
    })
}

/// Samples that are left of an epoch.
pub(super) fn left(state: &SamplerState) -> usize {
    state.dataset_len.saturating_sub(state.consumed)
}

/// Goes on from a checkpoint, if that is asked for. To be called on every rank.
pub(super) fn resume<T: Task>(
    keeping: &mut Keeping<'_>,
    rank: &Rank,
    task: &T,
    job: &mut Job<T>,
    mut log: Option<&mut RunLog<'_>>,
) -> Result<()> {
    let Some(contents) = keeping.choose(rank, log.as_deref_mut())? else { return Ok(()) };
    let read = job.parallel.load_checkpoint(&contents, &mut job.optimizer).map_err(offer)?;
    let kept: Kept<Own> = Kept::of(&read)?;
    let state = state(&contents)?;
    job.batches.resume(&state)?;
    task.check_left(contents.epoch as usize, left(&state))?;
    let (epoch, batch, step) = (contents.epoch as usize, kept.own.batch, contents.step as usize);
    job.at = Position { epoch, batch, step };
    let dealt = |then| {
        format!(
            "; it was made with {then} data-parallel ranks, so what is left of the data is distributed again, and the numbers are \
             those of neither"
        )
    };
    let place = format!("epoch {epoch}, batch {batch} (step {step})");
    keeping.resumed((&contents, &kept), (epoch, batch), log, &place, dealt)
}

/// Writes a checkpoint if one is due: every so many steps, without such a number at the end of each epoch, and in the end. To be
/// called on every rank, after each step.
pub(super) fn keep<T: Task>(
    keeping: &mut Keeping<'_>,
    (epoch_ended, is_last): (bool, bool),
    job: &Job<T>,
    log: Option<&mut RunLog<'_>>,
) -> Result<()> {
    let Position { epoch, batch, step } = job.at;
    let due = keeping.due(step, |every| is_last || (epoch_ended && every.is_none()))?;
    let Some(checkpoints) = due else { return Ok(()) };
    let _span = tracing::info_span!("checkpoint").entered();
    let mut checkpoint = keeping.checkpoint(step, log, Own { batch })?;
    checkpoint.epoch = epoch as u64;
    checkpoint.sampler = serde_json::to_value(job.batches.state())
        .map_err(|reason| Error::Checkpoint { problem: format!("its state cannot be written: {reason}") })?;
    job.parallel.save_checkpoint(&checkpoints, &job.optimizer, &checkpoint)?;
    Ok(())
}
