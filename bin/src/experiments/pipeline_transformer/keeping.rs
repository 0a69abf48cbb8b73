//! Checkpoints of the run: each rank writes and reads its own stages.

use comm::broadcast_object;
use pipeline::Pipeline;
use serde::{Deserialize, Serialize};
use training::Sgd;

use crate::error::Result;
use crate::options::offer;
use crate::rank::Rank;
use crate::run_log::RunLog;
use crate::trainer::parts::{Keeping, Kept};

/// What a checkpoint keeps beside tensors and what all runs keep.
#[derive(Debug, Serialize, Deserialize)]
struct Own {
    /// Of the epoch.
    #[serde(default)]
    batch: usize,
}

/// What is the same throughout a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Course {
    pub(super) steps_per_epoch: usize,
    /// The rank that has the log.
    pub(super) reporter: usize,
}

/// Goes on from a checkpoint, if that is asked for: the step that comes next. To be called on every rank.
pub(super) fn resume(
    keeping: &mut Keeping<'_>,
    course: Course,
    rank: &Rank,
    (pipeline, optimizer): (&Pipeline, &mut Sgd),
    mut log: Option<&mut RunLog<'_>>,
) -> Result<usize> {
    let Some(contents) = keeping.choose(rank, log.as_deref_mut())? else { return Ok(0) };
    let read = pipeline.load_checkpoint(&contents, Some(optimizer)).map_err(offer)?;
    let kept: Kept<Own> = Kept::of(&read)?;
    let step = contents.step as usize;
    let (epoch, batch) = (step / course.steps_per_epoch, step % course.steps_per_epoch);
    let cut = |then| format!("; it was made with world size {then}, the model is cut again");
    let place = format!("epoch {epoch}, batch {batch} (step {step})");
    keeping.resumed((&contents, &kept), (epoch, batch), log, &place, cut)?;
    Ok(step)
}

/// Writes a checkpoint after so many steps, if one is due or these are all. To be called on every rank.
pub(super) fn keep(
    keeping: &mut Keeping<'_>,
    course: Course,
    (step, is_last): (usize, bool),
    rank: &Rank,
    (pipeline, optimizer): (&Pipeline, &Sgd),
    log: Option<&mut RunLog<'_>>,
) -> Result<()> {
    let epoch_ended = step.is_multiple_of(course.steps_per_epoch);
    let due = keeping.due(step, |every| is_last || (epoch_ended && every.is_none()))?;
    let Some(checkpoints) = due else { return Ok(()) };
    let _span = tracing::info_span!("checkpoint").entered();
    let mut checkpoint = keeping.checkpoint(step, log, Own { batch: step % course.steps_per_epoch })?;
    checkpoint.epoch = (step / course.steps_per_epoch) as u64;
    // Rank 0 writes it, and another one has the log.
    checkpoint.extra = broadcast_object(&*rank.comm, &checkpoint.extra, course.reporter)?;
    pipeline.save_checkpoint(&checkpoints, Some(optimizer), &checkpoint)?;
    Ok(())
}
