//! Consistency checks: a resumed run must have the same data, and all ranks the same configuration.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;

use crate::far::checkpoints::FarRun;
use crate::settings::{Setting, setting_difference};
use candle_core::{Device, Tensor};
use sampler::SamplerState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::build::Model;
use training::{Checkpoint, Contents, load_tensors};

use super::{CheckpointPlan, Data, LearningRate, ObserverState, TrainConfig};
use crate::{Error, Parallel, ParallelConfig, Result};

/// What a checkpoint holds in addition to model, optimizer and the position in the data.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct CheckpointExtra {
    /// [`Data::fingerprint`]; empty if the program compares its data itself.
    pub data: String,
    /// Name of the optimizer; empty if the program compares it itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub optimizer: String,
    /// Of groups that train on their own, which have checkpoints of their own: the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub far: Option<FarRun>,
    /// The program's settings by name.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    /// [`ObserverState::values`].
    #[serde(default)]
    pub observer: Value,
}

/// Name of the tensor set of an observer.
const OBSERVER: &str = "observer";

impl CheckpointExtra {
    /// Returns the checkpoint of a step, without model and optimizer, with the tensors of an observer and the position in the
    /// data.
    ///
    /// # Errors
    /// A state that is no JSON.
    pub fn at(
        &self,
        epoch: u64,
        step: u64,
        sampler: Value,
        tensors: HashMap<String, Tensor>,
    ) -> Result<Checkpoint> {
        let extra = serde_json::to_value(self)
            .map_err(|error| Error::invalid("a checkpoint", "state", error.to_string()))?;
        let tensors = if tensors.is_empty() { None } else { Some((OBSERVER.to_string(), tensors)) };
        Ok(Checkpoint { epoch, step, sampler, extra, tensors: tensors.into_iter().collect() })
    }

    /// Reads it from a checkpoint.
    ///
    /// # Errors
    /// A checkpoint without it.
    pub fn of(contents: &Contents) -> Result<Self> {
        let extra = strategy::checkpoint::extra(contents).cloned().unwrap_or_default();
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
    // Earlier versions knew no other one.
    let (before, own) =
        (if kept.optimizer.is_empty() { "adamw" } else { &*kept.optimizer }, config.optimizer.name());
    if before != own {
        return Err(refuse(format!(
            "it was made with the optimizer {before}, from whose state {own} cannot go on: give the same, or start again in another folder"
        )));
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
    let of_data = Setting::new("data:", data.fingerprint());
    let settings = [of_config(config), of_model(model.config()), vec![of_data]].concat();
    let difference = setting_difference(&**model.world(), &settings)?;
    difference.map_or(Ok(()), |difference| Err(Error::Differ(Box::new(difference))))
}

/// Returns the fields of a configuration that must be the same on all ranks, and the program's settings.
fn of_config(config: &TrainConfig) -> Vec<Setting> {
    // Without `..`, so that a new field is compared, or is said not to be.
    let TrainConfig {
        steps,
        batch_size,
        learning_rate,
        schedule: LearningRate { warmup, decay, lowest },
        optimizer,
        clip,
        shuffle,
        seed,
        evaluate_every,
        evaluation_rows,
        checkpoints,
        fewest_ranks,
        // A rank that joins a running job learns the job's layout from the others.
        replacement: _,
        gradient_check,
        gradient_check_work,
        far,
        // Each rank hears for itself that it is asked to stop; whether any listens must be the same.
        stop,
        settings,
    } = config;
    // The path of the folder may be written in several ways.
    let plan = checkpoints.as_ref().map(|CheckpointPlan { dir: _, every, keep, in_background }| {
        format!(
            "every {every} steps, of which {keep} are kept{}",
            if *in_background { ", in the background" } else { "" }
        )
    });
    let field = |name: &str, value: &dyn Debug| Setting::new(name, format_args!("{value:?}"));
    let fields = [
        field("steps", steps),
        field("batch_size", batch_size),
        field("learning_rate", learning_rate),
        field("schedule.warmup", warmup),
        field("schedule.decay", decay),
        field("schedule.lowest", lowest),
        field("clip", clip),
        field("shuffle", shuffle),
        field("seed", seed),
        field("evaluate_every", evaluate_every),
        field("evaluation_rows", evaluation_rows),
        field("fewest_ranks", fewest_ranks),
        field("gradient_check", gradient_check),
        field("gradient_check_work", gradient_check_work),
        field("far", far),
        field("stop", &stop.is_some()),
        Setting { value: plan, ..Setting::absent("checkpoints") },
    ];
    let program = settings.iter().map(|(name, value)| Setting::new(name, value));
    program.chain(fields).chain(optimizer.fields()).collect()
}

/// Returns the fields of a model's configuration that must be the same on all ranks and are not compared when it is
/// built.
fn of_model(config: &ParallelConfig) -> Vec<Setting> {
    let ParallelConfig {
        dtype,
        micro_batches,
        schedule,
        recompute,
        sequence_parallel,
        loss_scale,
        seed,
        balance,
        far_groups,
        ..
    } = config;
    let field = |name: &str, value: &dyn Debug| Setting::new(name, format_args!("{value:?}"));
    vec![
        field("dtype", dtype),
        field("micro_batches", micro_batches),
        field("pipeline schedule", schedule),
        field("recompute", recompute),
        field("sequence_parallel", sequence_parallel),
        field("loss_scale", loss_scale),
        field("seed of rows", seed),
        field("balance of experts", balance),
        field("groups of far", far_groups),
    ]
}
