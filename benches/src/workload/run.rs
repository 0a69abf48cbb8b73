//! The measured training loop.

use std::sync::Arc;
use std::time::Instant;

use cli::error::Result;
use comm::internal::peak_rss_bytes;
use comm::{Communicator, Operation, Tcp, all_gather_object, broadcast_object};
use serde::{Deserialize, Serialize};

use super::train::{Step, Workload};
use super::{Steps, Strategy, Training, data_parallel, pipeline, sharded, tensor_parallel};
use crate::TimeSplit;
use crate::clock::{self, Interval};
use crate::split::split;

/// Minimum and maximum number of measured steps, if a time is given.
const STEPS: (f64, f64) = (3.0, 1000.0);

/// Measurements of a training workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Mean seconds per step: from when the first rank starts until the last one ends, divided by the number of steps.
    pub step_s: f64,
    /// Number of measured steps.
    pub steps: usize,
    /// When rank 0 completed its first step, on the clock of [`Ranks::to_first_step`](crate::Ranks::to_first_step).
    pub(crate) first_step_at: u64,
    /// Indexed by rank.
    pub ranks: Vec<RankFigures>,
}

/// Measurements of one rank, per step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankFigures {
    /// Breakdown of the time.
    pub split: TimeSplit,
    /// Seconds of the forward pass.
    pub forward_s: f64,
    /// Seconds of the backward pass, including all communication.
    pub backward_s: f64,
    /// Seconds of the optimizer step.
    pub optimizer_s: f64,
    /// Bytes sent to other ranks.
    pub bytes_sent: f64,
    /// Peak resident memory of the process, in bytes, where known.
    pub peak_rss_bytes: Option<u64>,
    /// Number of elements of this rank's parameters.
    pub parameters: usize,
}

/// Runs the workload. Every rank must call it.
pub(crate) fn run(training: &Training, comm: Tcp) -> Result<Figures> {
    clock::install();
    let comm: Arc<dyn Communicator> = Arc::new(comm);
    let mut workload = match training.strategy {
        Strategy::Ddp { .. } => data_parallel::workload(training, comm.clone())?,
        Strategy::Fsdp => sharded::workload(training, comm.clone())?,
        Strategy::TensorParallel => tensor_parallel::workload(training, comm.clone())?,
        Strategy::Pipeline { .. } => pipeline::workload(training, comm.clone())?,
    };
    (workload.step)()?;
    let first_step_at = clock::now();
    for _ in 1..training.warm_up {
        (workload.step)()?;
    }
    let steps = match training.steps {
        Steps::Count(steps) => steps.max(1),
        Steps::Seconds(seconds) => {
            let tried = Instant::now();
            (workload.step)()?;
            let steps = (seconds / tried.elapsed().as_secs_f64().max(1e-6)).clamp(STEPS.0, STEPS.1);
            broadcast_object(&*comm, &(steps as usize), 0)?
        }
    };
    measured(&*comm, workload, steps, first_step_at)
}

fn measured(
    comm: &dyn Communicator,
    mut workload: Workload,
    steps: usize,
    first_step_at: u64,
) -> Result<Figures> {
    comm.run(Operation::Barrier)?;
    clock::record();
    let began = clock::now();
    let (mut totals, mut sent) = ([0.0; 3], 0);
    for _ in 0..steps {
        let Step { phases, bytes_sent } = (workload.step)()?;
        totals.iter_mut().zip(phases).for_each(|(sum, seconds)| *sum += seconds);
        sent += bytes_sent;
    }
    let ended = clock::now();
    let intervals = clock::recorded();
    let each = |seconds: f64| seconds / steps as f64;
    let [forward_s, backward_s, optimizer_s] = totals.map(each);
    let own = RankFigures {
        split: TimeSplit::default(),
        forward_s,
        backward_s,
        optimizer_s,
        bytes_sent: sent as f64 / steps as f64,
        peak_rss_bytes: peak_rss_bytes(),
        parameters: workload.parameters,
    };
    let all: Vec<(RankFigures, Interval, Vec<Interval>)> =
        all_gather_object(comm, &(own, (began, ended), intervals))?;
    // The period lasts until the last rank has done all steps: ranks that finish earlier count as waiting.
    let last = all.iter().map(|(_, (_, ended), _)| *ended).max().unwrap_or(ended);
    let first = all.iter().map(|(_, (began, _), _)| *began).min().unwrap_or(began);
    let (mut ranks, mut blocked) = (Vec::new(), Vec::new());
    for (figures, (began, ended), mut intervals) in all {
        intervals.insert(0, (first, began));
        intervals.push((ended, last));
        ranks.push(figures);
        blocked.push(intervals);
    }
    for (figures, split) in ranks.iter_mut().zip(split(&blocked, (first, last))) {
        let TimeSplit { compute_s, communication_s, waiting_s } = split;
        figures.split = TimeSplit {
            compute_s: each(compute_s),
            communication_s: each(communication_s),
            waiting_s: each(waiting_s),
        };
    }
    Ok(Figures { step_s: each((last - first) as f64 * 1e-9), steps, first_step_at, ranks })
}
