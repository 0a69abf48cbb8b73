//! `--json`: the plan for programs.

use std::path::Path;

use serde::Serialize;

use crate::error::Result;
use crate::file_error::FileError;

use super::model::Model;
use super::recommended;
use super::strategy::{Estimate, Memory, Setting};

/// All that is planned for, and what comes of it.
#[derive(Serialize)]
struct Plan<'a> {
    model: &'a str,
    parameters: u64,
    ranks: usize,
    batch_size: usize,
    /// Bytes.
    memory: f64,
    /// Bytes a second.
    bandwidth: f64,
    /// Seconds.
    latency: f64,
    /// Operations a second.
    flops: f64,
    strategies: Vec<Planned>,
    recommended: Option<String>,
}

#[derive(Serialize)]
struct Planned {
    strategy: String,
    fits: bool,
    #[serde(flatten)]
    memory: Memory,
    sent: f64,
    seconds: f64,
    waiting: f64,
}

/// Writes the file.
pub(super) fn write(
    path: &Path,
    (model, setting): (&Model, &Setting),
    memory: f64,
    estimates: &[Estimate],
) -> Result<()> {
    let name = |estimate: &Estimate| estimate.strategy.name(setting.ranks);
    let planned = |estimate: &Estimate| Planned {
        strategy: name(estimate),
        fits: estimate.memory.total() <= memory,
        memory: estimate.memory,
        sent: estimate.sent,
        seconds: estimate.seconds,
        waiting: estimate.waiting,
    };
    let plan = Plan {
        model: &model.name,
        parameters: model.parameters(),
        ranks: setting.ranks,
        batch_size: setting.batch_size,
        memory,
        bandwidth: setting.bandwidth,
        latency: setting.latency,
        flops: setting.flops,
        strategies: estimates.iter().map(planned).collect(),
        recommended: recommended(estimates, memory).map(name),
    };
    let text = serde_json::to_string_pretty(&plan).map_err(|error| FileError::write(path, error))?;
    Ok(std::fs::write(path, text + "\n").map_err(|error| FileError::write(path, error))?)
}
