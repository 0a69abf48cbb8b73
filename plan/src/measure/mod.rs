//! What a plan stands on, measured: the time of collectives by size, the median over many calls with a barrier before
//! each ([`measure`]), and the speeds of a [`Machine`].

mod machine;
mod operation;
pub mod size;

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, Result};
use serde::{Deserialize, Serialize};

pub use machine::Machine;
pub use operation::Measured;

/// Warm-up calls, not counted: they open connections and touch memory pages.
const WARM_UP: usize = 3;
/// Minimum and maximum number of measured calls.
const CALLS: (usize, usize) = (5, 2000);

/// The result for one operation and size; a line of `comm-bench --json`, from which a [`fit`](crate::forecast::fit::fit) makes a network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the operation.
    pub op: String,
    /// Number of ranks.
    pub world: usize,
    /// Size of the whole buffer in bytes: for operations with parts, of the parts of all ranks.
    pub bytes: usize,
    /// Median time of a call on rank 0, in seconds.
    pub s: f64,
    /// Number of measured calls.
    pub calls: usize,
    /// `bytes` per second, in 10^9.
    pub gb_s: f64,
    /// `gb_s` times `Measured::bus_factor`.
    pub bus_gb_s: f64,
}

impl Row {
    /// Makes the row of an operation whose median over `calls` calls is `s` seconds.
    pub fn new(measured: Measured, world: usize, bytes: usize, (s, calls): (f64, usize)) -> Self {
        let gb_s = if s > 0.0 { bytes as f64 / s * 1e-9 } else { 0.0 };
        let bus_gb_s = gb_s * measured.bus_factor(world);
        Self { op: measured.name().into(), world, bytes, s, calls, gb_s, bus_gb_s }
    }
}

/// Measures one operation and size. Every rank must call it; each returns its own times, so rank 0's is the result.
///
/// `budget` is the approximate time it may take; if `calls` is given, that many calls are measured regardless of time.
///
/// # Errors
/// A rank that failed; out of memory.
pub fn measure(
    comm: &dyn Communicator,
    measured: Measured,
    bytes: usize,
    elements: (DType, &Device),
    calls: Option<usize>,
    budget: Duration,
) -> Result<Row> {
    let operation = measured.operation(comm, bytes, elements)?;
    let mut warm = timed(comm, &operation, WARM_UP)?;
    let calls = match calls {
        Some(calls) => calls,
        None => broadcast_count(comm, calls_within_budget(&mut warm, budget))?,
    };
    let mut times = timed(comm, &operation, calls)?;
    Ok(Row::new(measured, comm.world_size(), bytes, (median(&mut times), calls)))
}

/// Returns the seconds of each call.
fn timed(comm: &dyn Communicator, operation: &Operation, calls: usize) -> Result<Vec<f64>> {
    // Capped, so that a huge number of calls does not fail to allocate before the first one.
    let mut times = Vec::with_capacity(calls.min(CALLS.1));
    for _ in 0..calls {
        comm.run(Operation::Barrier)?;
        let began = Instant::now();
        comm.run(operation.clone())?;
        times.push(began.elapsed().as_secs_f64());
    }
    Ok(times)
}

/// Returns the number of calls that fit into the budget, within [`CALLS`].
fn calls_within_budget(warm: &mut [f64], budget: Duration) -> usize {
    let calls = budget.as_secs_f64() / median(warm).max(1e-9);
    (calls as usize).clamp(CALLS.0, CALLS.1)
}

/// Broadcasts rank 0's number to all ranks.
fn broadcast_count(comm: &dyn Communicator, calls: usize) -> Result<usize> {
    let tensor = Tensor::new(&[calls as i64], &Device::Cpu)?;
    comm.run(Operation::Broadcast { tensor: tensor.clone(), root: 0 })?;
    Ok(tensor.to_vec1::<i64>()?[0] as usize)
}

/// Returns the median; 0 for no values.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let (low, high) = ((times.len().max(1) - 1) / 2, times.len() / 2);
    match (times.get(low), times.get(high)) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use comm::Local;

    use super::*;

    #[test]
    fn the_median_is_that_of_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&mut []), 0.0);
    }

    #[test]
    fn all_ranks_measure_as_many_calls() {
        let rows = Local::run(3, |comm| {
            let elements = (DType::F32, &Device::Cpu);
            measure(comm, Measured::AllReduce, 1200, elements, None, Duration::from_millis(20))
        })
        .unwrap();
        let calls = rows[0].calls;
        assert!((CALLS.0..=CALLS.1).contains(&calls));
        assert!(rows.iter().all(|row| row.calls == calls && row.s > 0.0 && row.bytes == 1200));
        let row = &rows[0];
        assert!((row.bus_gb_s / row.gb_s - 4.0 / 3.0).abs() < 1e-9);
    }
}
