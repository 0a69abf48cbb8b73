//! What must be the same: data when a run goes on, and what all ranks are told.

use std::collections::BTreeMap;

use candle_core::Device;
use comm::{LineDifference, line_difference};
use sampler::SamplerState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::Contents;
use training::build::Model;

use super::{Data, ObserverState, TrainConfig};
use crate::{Error, Parallel, Result};

/// What a checkpoint keeps beside model and optimizer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    pub(super) data: String,
    #[serde(default)]
    pub(super) settings: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) observer: Value,
}

/// The set of an observer's tensors.
pub(super) const OBSERVER: &str = "observer";

impl Kept {
    fn of(contents: &Contents) -> Result<Self> {
        let extra = contents.extra.get("extra").cloned().unwrap_or_default();
        serde_json::from_value(extra).map_err(|error| {
            let problem = format!("it was not written by a training of this kind: {error}");
            Error::file(&contents.folder, problem)
        })
    }
}

/// A setting that a checkpoint's run had otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedSetting {
    /// Its name in [`TrainConfig::settings`].
    pub name: String,
    /// Its value in the checkpoint's run.
    pub before: String,
    /// Its value now.
    pub now: String,
}

/// Whether a run can go on from a checkpoint: with the same data in the same order. Gives the settings that differ, which may. The size of
/// batches is one of them: the next batch begins with the row that comes next, whatever its size.
///
/// # Errors
/// A checkpoint that was made with other data, another seed or another shuffling, or that [`Trainer`](super::Trainer) has not written.
pub fn check_resume(
    contents: &Contents,
    data: &dyn Data,
    config: &TrainConfig,
) -> Result<Vec<ChangedSetting>> {
    let refuse = |problem: String| Error::file(&contents.folder, problem);
    let (kept, own) = (Kept::of(contents)?, data.fingerprint());
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

/// What a checkpoint has kept of the observer of its run.
///
/// # Errors
/// A checkpoint that [`Trainer`](super::Trainer) has not written; one that is not as it was written, with the name of the file.
pub fn observer_state(contents: &Contents) -> Result<ObserverState> {
    let values = Kept::of(contents)?.observer;
    if !contents.files.contains_key(OBSERVER) {
        return Ok(ObserverState { values, ..ObserverState::default() });
    }
    contents.check(OBSERVER)?;
    let tensors = candle_core::safetensors::load(contents.path(OBSERVER), &Device::Cpu)?;
    Ok(ObserverState { values, tensors })
}

/// Refuses a configuration or data that differ from those of most ranks.
pub(super) fn same_on_all_ranks<M: Model>(
    model: &Parallel<M>,
    data: &dyn Data,
    config: &TrainConfig,
) -> Result<()> {
    // Where checkpoints are may be said in several ways.
    let own = [format!("{:?}", TrainConfig { checkpoints: None, ..config.clone() }), data.fingerprint()];
    let Some(difference) = line_difference(&**model.mesh().world(), 0, &own)? else { return Ok(()) };
    let LineDifference { odd_rank, odd, rank, expected, .. } = difference;
    let help = format!("rank {rank} has {expected}: give all ranks the same");
    Err(Error::invalid(format!("rank {odd_rank}'s training"), odd, help))
}
