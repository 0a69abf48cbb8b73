//! A run's log in checkpoints, so that the report of a resumed run covers all of it.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::run_log::{LogState, RunLog};
use candle_core::{Device, Tensor};
use girandole::trainer::ObserverState;
use report::Evaluation;
use serde::{Deserialize, Serialize};

const LOSSES: &str = "losses";
/// Prefix of the names of further quantities of the steps; their place follows, and their name.
const QUANTITY: &str = "quantity.";

/// The part of the state that is not stored as tensors.
#[derive(Serialize, Deserialize)]
struct SavedLog {
    log: LogState,
    evaluations: Vec<Evaluation>,
}

/// Returns the current state of the log.
pub(super) fn of(log: &RunLog<'_>) -> girandole::Result<ObserverState> {
    let (state, losses) = log.state();
    // JSON cannot represent non-finite numbers.
    let evaluations = log.evaluations().iter().filter(|evaluation| evaluation.loss.is_finite());
    let kept = SavedLog { log: state, evaluations: evaluations.cloned().collect() };
    let values = serde_json::to_value(kept).map_err(comm::carry)?;
    let mut tensors = HashMap::new();
    if !losses.is_empty() {
        tensors.insert(LOSSES.to_string(), Tensor::new(losses, &Device::Cpu)?);
        for (place, (name, values)) in log.quantities().enumerate() {
            tensors.insert(format!("{QUANTITY}{place}.{name}"), Tensor::new(values, &Device::Cpu)?);
        }
    }
    Ok(ObserverState { values, tensors })
}

/// Restores the log after `steps` steps.
pub(super) fn resume(log: &mut RunLog<'_>, steps: usize, state: ObserverState) -> Result<()> {
    let ObserverState { values, tensors } = state;
    if values.is_null() {
        log.begin_at(steps);
        return Ok(());
    }
    let kept: SavedLog = serde_json::from_value(values).map_err(|error| {
        let problem = format!("what it keeps of the run's losses cannot be read: {error}");
        Error::Checkpoint { problem }
    })?;
    let losses = tensors.get(LOSSES).map(Tensor::to_vec1::<f32>).transpose()?;
    log.resume(steps, kept.log, losses.unwrap_or_default());
    let mut quantities = Vec::new();
    for (name, values) in &tensors {
        if let Some((place, name)) = name.strip_prefix(QUANTITY).and_then(|name| name.split_once('.')) {
            quantities.push((place, name.to_string(), values.to_vec1::<f32>()?));
        }
    }
    quantities.sort_by_key(|(place, ..)| place.parse::<usize>().unwrap_or(usize::MAX));
    log.resume_quantities(quantities.into_iter().map(|(_, name, values)| (name, values)));
    log.resume_evaluations(kept.evaluations);
    Ok(())
}
