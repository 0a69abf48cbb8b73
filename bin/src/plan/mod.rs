//! `plan`: which way to spread a model over ranks fits, what it costs, and which to take.

pub mod collective;
mod json;
mod machine;
pub mod model;
mod options;
pub mod strategy;
mod table;
mod units;

pub use options::{ModelName, Optimizer, PlanOptions};

use comm::launch;

use crate::console::say;
use crate::error::Result;
use crate::outputs::check_in_place;
use crate::report::total_memory_bytes;
use crate::start::SPAWNED_FOR;

use machine::Machine;
use strategy::{Estimate, Setting, Strategy};

/// The command's name.
pub const NAME: &str = "plan";

/// Runs the command.
///
/// # Errors
/// A wrong option; ranks that could not measure.
pub fn run(options: &PlanOptions) -> Result<()> {
    if launch::is_worker() && std::env::var_os(SPAWNED_FOR).is_some_and(|name| name == NAME) {
        return Machine::rank();
    }
    options.check()?;
    options.json.as_deref().map_or(Ok(()), check_in_place)?;
    let model = options.model()?;
    let (machine, measured) = machine(options)?;
    let Machine { bandwidth, latency, flops } = machine;
    let setting = Setting {
        ranks: options.ranks,
        batch_size: options.batch_size,
        micro_batches: options.micro_batches,
        element: options.element_bytes as u64,
        gathered: options.gathered_bytes.unwrap_or(options.element_bytes) as u64,
        optimizer: options.optimizer.numbers(),
        bandwidth,
        latency,
        flops,
    };
    let memory =
        options.memory.unwrap_or_else(|| total_memory_bytes().unwrap_or(0) as f64 / options.ranks as f64);
    let estimates = estimates(&model, &setting);
    if let Some(path) = &options.json {
        json::write(path, (&model, &setting), memory, &estimates)?;
    }
    let shown = table::Shown { model: &model, setting: &setting, memory, measured };
    shown.lines(&estimates).iter().try_for_each(|line| say(format_args!("{line}")))
}

/// What is given, and what else is measured; whether anything was.
fn machine(options: &PlanOptions) -> Result<(Machine, bool)> {
    if let (Some(bandwidth), Some(latency), Some(flops)) = (options.bandwidth, options.latency, options.flops)
    {
        return Ok((Machine { bandwidth, latency, flops }, false));
    }
    let measured = Machine::measured()?;
    let machine = Machine {
        bandwidth: options.bandwidth.unwrap_or(measured.bandwidth),
        latency: options.latency.unwrap_or(measured.latency),
        flops: options.flops.unwrap_or(measured.flops),
    };
    Ok((machine, true))
}

/// What each strategy needs, the simplest first.
pub fn estimates(model: &model::Model, setting: &Setting) -> Vec<Estimate> {
    Strategy::all(model, setting).into_iter().map(|strategy| strategy.estimate(model, setting)).collect()
}

/// The quickest that fits into so many bytes; of those that are about as quick the simplest.
pub fn recommended(estimates: &[Estimate], memory: f64) -> Option<&Estimate> {
    let fits = || estimates.iter().filter(|estimate| estimate.memory.total() <= memory);
    let quickest = fits().map(|estimate| estimate.seconds).min_by(f64::total_cmp)?;
    fits().find(|estimate| estimate.seconds <= quickest * 1.02)
}
