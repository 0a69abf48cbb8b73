//! Peak memory of each rank by kind: measured, and computed by formulas.

use candle_core::Tensor;
use comm::peak_rss_bytes;
use experiment::error::Result;
use experiment::trainer::Sharded;
use fsdp::Fsdp;
use serde::{Deserialize, Serialize};

use super::model::LargeModel;
use super::options::{FsdpMlpOptions, Sharding};

/// Peak bytes of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct PeakMemory {
    pub(super) parameters: usize,
    pub(super) gradients: usize,
    pub(super) optimizer: usize,
    /// `None` in the rows that are computed by formula.
    pub(super) activations: Option<usize>,
    /// Peak of the whole process, where known.
    pub(super) process: Option<u64>,
}

impl PeakMemory {
    pub(super) fn of<B, L>(trainee: &Sharded<LargeModel, B, L>) -> Self
    where
        L: Fn(&Fsdp<LargeModel>, &B) -> Result<Tensor>,
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

/// Computes the memory of one rank with this sharding: its shard of everything, two whole units of gradients, and of
/// parameters two whole units (full and hybrid sharding) or all.
pub(super) fn sharded(options: &FsdpMlpOptions, world_size: usize) -> PeakMemory {
    let mut units = options.model().elements().unwrap_or_default();
    let all: usize = units.iter().sum();
    units.sort_unstable();
    let two: usize = units.iter().rev().take(2).sum();
    let own = all.div_ceil(options.shards(world_size));
    let param = options.param_dtype.dtype().size_in_bytes();
    let reduce = options.reduce_dtype.unwrap_or(options.param_dtype).dtype().size_in_bytes();
    let whole = match options.sharding {
        Sharding::FullShard | Sharding::HybridShard => two,
        Sharding::ShardGradOp | Sharding::NoShard => all,
    };
    PeakMemory {
        parameters: own * MASTER + whole * param,
        gradients: own * MASTER + two * reduce,
        optimizer: own * ADAM,
        ..PeakMemory::default()
    }
}

/// Computes the memory of one rank that holds everything, as in data parallelism.
pub(super) fn replicated(options: &FsdpMlpOptions) -> PeakMemory {
    let all: usize = options.model().elements().unwrap_or_default().iter().sum();
    PeakMemory {
        parameters: all * MASTER,
        gradients: all * MASTER,
        optimizer: all * ADAM,
        ..PeakMemory::default()
    }
}

/// Formats the table, line by line.
pub(super) fn table(rows: &[(String, PeakMemory)]) -> Vec<String> {
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
