//! Peak memory by kind of each rank of a sharded model: measured, and computed by formulas.

use candle_core::{DType, Tensor};
use comm::internal::peak_rss_bytes;
use fsdp::{Fsdp, FsdpConfig, MixedPrecision, ShardingStrategy};
use serde::{Deserialize, Serialize};

use cli::error::Result;
use cli::trainer::Sharded;

/// Peak bytes of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PeakMemory {
    /// Shards, and gathered units.
    pub parameters: usize,
    /// Gradients of shards and of whole units.
    pub gradients: usize,
    /// State of the optimizer.
    pub optimizer: usize,
    /// What is kept for backward; `None` in the rows that are computed by formula.
    pub activations: Option<usize>,
    /// Peak of the whole process, where known.
    pub process: Option<u64>,
}

impl PeakMemory {
    /// Returns the peaks of this rank so far.
    pub fn of<M, B, L>(trainee: &Sharded<M, B, L>) -> Self
    where
        L: Fn(&Fsdp<M>, &B) -> Result<Tensor>,
    {
        let memory = trainee.fsdp().memory();
        Self {
            parameters: memory.parameters.peak,
            gradients: memory.gradients.peak,
            optimizer: trainee.optimizer().state_bytes(),
            activations: Some(trainee.activations()),
            process: peak_rss_bytes(),
        }
    }
}

const COLUMNS: [&str; 5] = ["parameters", "gradients", "optimizer", "activations", "process"];
const FIRST: usize = 26;
const WIDTH: usize = 12;
/// Bytes per parameter of an f32 shard; Adam keeps two moments of the same size.
const MASTER: usize = size_of::<f32>();
const ADAM: usize = 2 * MASTER;

/// Computes the memory of one rank, given the numbers of elements of the model's units: its shard of everything, two
/// whole units of gradients, and of parameters two whole units (full sharding) or all.
pub fn sharded(units: &[usize], shards: usize, config: &FsdpConfig) -> PeakMemory {
    let all: usize = units.iter().sum();
    let mut largest = units.to_vec();
    largest.sort_unstable();
    let two: usize = largest.iter().rev().take(2).sum();
    let own = all.div_ceil(shards);
    let bytes = |dtype: Option<DType>| dtype.map_or(MASTER, |dtype| dtype.size_in_bytes());
    let MixedPrecision { param_dtype, reduce_dtype, .. } = config.mixed_precision;
    let whole = match config.strategy {
        ShardingStrategy::FullShard => two,
        _ => all,
    };
    PeakMemory {
        parameters: own * MASTER + whole * bytes(param_dtype),
        gradients: own * MASTER + two * bytes(reduce_dtype),
        optimizer: own * ADAM,
        ..PeakMemory::default()
    }
}

/// Computes the memory of one rank that holds all of the units, as in data parallelism.
pub fn replicated(units: &[usize]) -> PeakMemory {
    let all: usize = units.iter().sum();
    PeakMemory {
        parameters: all * MASTER,
        gradients: all * MASTER,
        optimizer: all * ADAM,
        ..PeakMemory::default()
    }
}

/// Formats the table, line by line.
pub fn table(rows: &[(String, PeakMemory)]) -> Vec<String> {
    let mut head = format!("{:<FIRST$}", "peak memory, MB (10^6)");
    COLUMNS.iter().for_each(|column| head += &format!("{column:>WIDTH$}"));
    let mut lines = vec![head];
    for (name, held) in rows {
        let mega = |bytes: Option<u64>| match bytes {
            Some(bytes) => format!("{:>WIDTH$.1}", bytes as f64 * 1e-6),
            None => format!("{:>WIDTH$}", "-"),
        };
        let bytes = |bytes: usize| mega(Some(bytes as u64));
        let activations = mega(held.activations.map(|bytes| bytes as u64));
        lines.push(format!(
            "{name:<FIRST$}{}{}{}{activations}{}",
            bytes(held.parameters),
            bytes(held.gradients),
            bytes(held.optimizer),
            mega(held.process)
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_in_line() {
        let held = PeakMemory { parameters: 1_500_000, activations: Some(40_000), ..PeakMemory::default() };
        let lines = table(&[("rank 0".into(), held), ("DDP, formula".into(), PeakMemory::default())]);
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["rank", "0", "1.5", "0.0", "0.0", "0.0", "-"]
        );
        assert!(lines.iter().all(|line| line.len() == FIRST + 5 * WIDTH), "{lines:?}");
    }
}
