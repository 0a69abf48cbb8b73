//! Consistency checks: a resumed run must have the same data, and all ranks the same configuration.

use std::collections::BTreeMap;

use candle_core::Device;
use comm::{LineDifference, line_difference};
use sampler::SamplerState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::build::Model;
use training::{Contents, load_tensors};

use super::{Data, ObserverState, TrainConfig};
use crate::{Error, Parallel, Result};

/// What a checkpoint holds in addition to model and optimizer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CheckpointExtra {
    pub(super) data: String,
    #[serde(default)]
    pub(super) settings: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) observer: Value,
}

/// Name of the tensor set of an observer.
pub(super) const OBSERVER: &str = "observer";

impl CheckpointExtra {
    fn of(contents: &Contents) -> Result<Self> {
        let extra = contents.extra.get("extra").cloned().unwrap_or_default();
        serde_json::from_value(extra).map_err(|error| {
            let problem = format!("it was not written by a training of this kind: {error}");
            Error::file(&contents.folder, problem)
        })
    }
}

/// A setting that had another value in the run of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedSetting {
    /// Its name in [`TrainConfig::settings`].
    pub name: String,
    /// Its value in the checkpoint's run.
    pub before: String,
    /// Its value now.
    pub now: String,
}

/// Checks that a run can resume from a checkpoint: with the same data in the same order. Returns the settings that
/// differ, which is allowed. The batch size may differ: the next batch starts at the next row, whatever its size.
///
/// # Errors
/// A checkpoint that was made with other data, another seed or another shuffling, or that [`Trainer`](super::Trainer)
/// has not written.
pub fn check_resume(
    contents: &Contents,
    data: &dyn Data,
    config: &TrainConfig,
) -> Result<Vec<ChangedSetting>> {
    let refuse = |problem: String| Error::file(&contents.folder, problem);
    let (kept, own) = (CheckpointExtra::of(contents)?, data.fingerprint());
    if kept.data != own {
        return Err(refuse(format!(
            "it was made with other data ({}, and this is {own}): give the same files in the same order, with rows as long, or start again in another folder",
            kept.data
        )));
    }
    let order: SamplerState = serde_json::from_value(contents.sampler.clone())
        .map_err(|error| refuse(format!("where it stands in the data cannot be read: {error}")))?;
    let same = "an epoch's rows would come in another order: give the same, or start again in another folder";
    if order.shuffle != config.shuffle {
        let (before, now) = if order.shuffle { ("", "not ") } else { ("not ", "") };
        return Err(refuse(format!(
            "its rows were {before}shuffled, and now they are {now}shuffled; {same}"
        )));
    }
    if order.seed != config.seed {
        let (before, now) = (order.seed, config.seed);
        return Err(refuse(format!("it was made with seed {before}, and now it is {now}; {same}")));
    }
    let changed = config.settings.iter().filter_map(|(name, now)| {
        let before = kept.settings.get(name).filter(|before| *before != now)?;
        Some(ChangedSetting { name: name.clone(), before: before.clone(), now: now.clone() })
    });
    Ok(changed.collect())
}

/// Reads the observer's state from a checkpoint.
///
/// # Errors
/// A checkpoint that [`Trainer`](super::Trainer) has not written; a file that has changed since it was written, by
/// name.
pub fn observer_state(contents: &Contents) -> Result<ObserverState> {
    let values = CheckpointExtra::of(contents)?.observer;
    if !contents.files.contains_key(OBSERVER) {
        return Ok(ObserverState { values, ..ObserverState::default() });
    }
    contents.check(OBSERVER)?;
    let tensors = load_tensors(&contents.path(OBSERVER), &Device::Cpu)?;
    Ok(ObserverState { values, tensors })
}

/// Refuses a configuration or data that differ from those of most ranks.
pub(super) fn check_equal_on_all_ranks<M: Model>(
    model: &Parallel<M>,
    data: &dyn Data,
    config: &TrainConfig,
) -> Result<()> {
    // Not compared: the path of the checkpoint folder may be written in several ways, and a rank that joins a running job
    // learns the job's layout from the others.
    let compared = TrainConfig { checkpoints: None, replacement: None, ..config.clone() };
    let own = [format!("{compared:?}"), data.fingerprint()];
    let Some(difference) = line_difference(&**model.mesh().world(), 0, &own)? else { return Ok(()) };
    let LineDifference { odd_rank, odd, rank, expected, .. } = difference;
    let help = format!("rank {rank} has {expected}: give all ranks the same");
    Err(Error::invalid(format!("rank {odd_rank}'s training"), odd, help))
}
