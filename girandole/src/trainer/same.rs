//! What must be the same: data when a run goes on, and what all ranks are told.

use comm::all_gather_object;
use serde::{Deserialize, Serialize};
use training::Contents;
use training::build::Model;

use super::{Data, TrainConfig};
use crate::{Error, Parallel, Result};

/// What a checkpoint keeps beside model and optimizer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    pub(super) data: String,
}

/// Whether a run's checkpoint was made with this data.
///
/// # Errors
/// One that was made with other data, or that [`Trainer`](super::Trainer) has not written.
pub fn check_data(contents: &Contents, data: &dyn Data) -> Result<()> {
    let refuse = |problem: String| Error::file(&contents.folder, problem);
    let extra = contents.extra.get("extra").cloned().unwrap_or_default();
    let kept: Kept = serde_json::from_value(extra)
        .map_err(|error| refuse(format!("it was not written by a training of this kind: {error}")))?;
    let own = data.fingerprint();
    if kept.data == own {
        return Ok(());
    }
    Err(refuse(format!(
        "it was made with other data ({}, and this is {own}): give the same files in the same order, or begin anew in another folder",
        kept.data
    )))
}

/// Refuses a configuration or data that differ from rank 0's.
pub(super) fn same_on_all_ranks<M: Model>(
    model: &Parallel<M>,
    data: &dyn Data,
    config: &TrainConfig,
) -> Result<()> {
    // Where checkpoints are may be said in several ways.
    let own = (format!("{:?}", TrainConfig { checkpoints: None, ..config.clone() }), data.fingerprint());
    let world = model.mesh().world();
    let all = all_gather_object(&**world, &own)?;
    let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
    let (of_first, of_other) = match all[rank].0 == all[0].0 {
        true => (&all[0].1, &all[rank].1),
        false => (&all[0].0, &all[rank].0),
    };
    let help = format!("rank 0 has {of_first}: give all ranks the same");
    Err(Error::invalid(format!("rank {rank}'s training"), of_other, help))
}
