//! Checkpoints of the run: each rank writes and reads its own part.

use fsdp::{LossScaler, LossScalerState};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::options::offer;
use crate::rank::Rank;
use crate::run_log::RunLog;
use crate::trainer::parts::{Keeping, Kept};

use super::step::Trainee;

/// Steps from one checkpoint to the next unless told otherwise: the help of `--checkpoint-every` says so, too.
const EVERY: usize = 20;

/// What a checkpoint keeps beside tensors and what all runs keep.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Own {
    #[serde(default)]
    scale: Option<LossScalerState>,
}

/// Goes on from a checkpoint, if that is asked for: the step that comes next. To be called on every rank.
pub(super) fn resume(
    keeping: &mut Keeping<'_>,
    rank: &Rank,
    trainee: &mut Trainee,
    mut log: Option<&mut RunLog<'_>>,
) -> Result<usize> {
    let Some(contents) = keeping.choose(rank, log.as_deref_mut())? else { return Ok(0) };
    let Trainee { fsdp, optimizer, scaler } = trainee;
    let kept: Kept<Own> = Kept::of(&fsdp.load_checkpoint(&contents, Some(optimizer)).map_err(offer)?)?;
    if let (Some(scaler), Some(scale)) = (scaler, kept.own.scale) {
        scaler.resume(scale);
    }
    let step = contents.step as usize;
    let dealt = |then| format!("; it was made with world size {then}, so the data are others from here on");
    keeping.resumed((&contents, &kept), (0, step), log, &format!("step {step}"), dealt)?;
    Ok(step)
}

/// Writes a checkpoint after so many steps, if one is due or these are all. To be called on every rank.
pub(super) fn keep(
    keeping: &mut Keeping<'_>,
    (step, is_last): (usize, bool),
    trainee: &Trainee,
    log: Option<&mut RunLog<'_>>,
) -> Result<()> {
    let due = keeping.due(step, |every| is_last || (every.is_none() && step.is_multiple_of(EVERY)))?;
    let Some(checkpoints) = due else { return Ok(()) };
    let _span = tracing::info_span!("checkpoint").entered();
    let scale = trainee.scaler.as_ref().map(LossScaler::state);
    let checkpoint = keeping.checkpoint(step, log, Own { scale })?;
    trainee.fsdp.save_checkpoint(&checkpoints, Some(&trainee.optimizer), &checkpoint)?;
    Ok(())
}
