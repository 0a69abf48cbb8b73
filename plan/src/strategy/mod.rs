//! Strategies of distributed training and their cost: memory by kind, bytes sent.

mod data;
pub(crate) mod pipeline;
mod sharded;
mod tensor;
mod ways;

use crate::compare::Memory;
use crate::model::Model;

pub(crate) use pipeline::split;
pub(crate) use ways::Shortage;

/// Strategy to distribute a model over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The whole model on every rank (`ddp`).
    Data,
    /// All parameters sharded over ranks, and gathered when needed (`fsdp`).
    ShardedData(Sharding),
    /// Layers divided over `tp` ranks, with replicas on the others (`tensor-parallel`).
    Tensor {
        /// Ranks that each layer is divided over.
        tp: usize,
        /// Whether activations between the layers are also divided.
        sequence_parallel: bool,
    },
    /// The model divided into as many stages as there are ranks (`pipeline`).
    Pipeline,
}

/// What is sharded, as in `fsdp-mlp --sharding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharding {
    /// Parameters, gradients and optimizer state.
    Full,
    /// Gradients and optimizer state; gathered parameters are kept from forward to backward.
    GradOp,
    /// All three, within groups of so many ranks; the groups are replicas.
    Hybrid {
        /// Ranks of a group.
        shards: usize,
    },
    /// Nothing.
    None,
}

impl Sharding {
    /// Returns over how many of `ranks` parameters are divided.
    pub(crate) fn ranks(self, ranks: usize) -> usize {
        match self {
            Self::Full | Self::GradOp => ranks,
            Self::Hybrid { shards } => shards.clamp(1, ranks),
            Self::None => 1,
        }
    }
}

/// Setting of training to plan for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setting {
    /// Number of ranks.
    pub ranks: usize,
    /// Samples per step, of all ranks together.
    pub batch_size: usize,
    /// Number of micro-batches of a pipeline.
    pub micro_batches: usize,
    /// Bytes of an element.
    pub element: u64,
    /// Bytes of an element in which sharded data parallelism gathers parameters, computes, and averages gradients.
    pub gathered: u64,
    /// Numbers of optimizer state per parameter.
    pub optimizer: u64,
}

impl Setting {
    /// Returns the number of micro-batches of a pipeline, each of which has a sample at least.
    pub(crate) fn parts(&self) -> usize {
        self.micro_batches.clamp(1, self.batch_size.max(1))
    }
}

/// Memory and bytes sent of a strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The strategy.
    pub strategy: Strategy,
    /// Memory of a rank.
    pub memory: Memory,
    /// Bytes that a rank sends in a step.
    pub sent: f64,
}

impl Estimate {
    /// Returns what is missing for the strategy if a rank has `memory` bytes; `None` if it fits.
    pub(crate) fn lack(&self, setting: &Setting, memory: f64) -> Option<Shortage> {
        if self.strategy.copies(setting.ranks) > setting.batch_size {
            return Some(Shortage::Samples);
        }
        (self.memory.total() > memory).then_some(Shortage::Memory)
    }
}

impl Strategy {
    /// Returns the name for this number of ranks.
    pub fn name(self, ranks: usize) -> String {
        match self {
            Self::Data => format!("dp {ranks}"),
            Self::ShardedData(Sharding::Full) => format!("fsdp {ranks}"),
            Self::ShardedData(Sharding::GradOp) => format!("fsdp {ranks} grad-op"),
            Self::ShardedData(Sharding::None) => format!("fsdp {ranks} no-shard"),
            Self::ShardedData(Sharding::Hybrid { shards }) => {
                format!("fsdp {shards}, dp {}", ranks / shards.max(1))
            }
            Self::Pipeline => format!("pipeline {ranks}"),
            Self::Tensor { tp: 1, .. } if ranks == 1 => "one process".into(),
            Self::Tensor { tp, sequence_parallel } => {
                let dp = ranks / tp;
                let copies = if dp > 1 { format!(", dp {dp}") } else { String::new() };
                format!("tp {tp}{}{copies}", if sequence_parallel { " sequence" } else { "" })
            }
        }
    }

    /// Estimates memory and bytes sent.
    pub fn estimate(self, model: &Model, setting: &Setting) -> Estimate {
        match self {
            Self::Data => data::estimate(model, setting),
            Self::ShardedData(sharding) => sharded::estimate(model, setting, sharding),
            Self::Tensor { tp, sequence_parallel } => tensor::estimate(model, setting, tp, sequence_parallel),
            Self::Pipeline => pipeline::estimate(model, setting),
        }
    }
}

/// Returns the samples of a rank if a batch is divided over so many ranks.
pub(crate) fn share(batch_size: usize, ranks: usize) -> u64 {
    batch_size.div_ceil(ranks).max(1) as u64
}

/// Returns the bytes of `numbers` elements per sample, as a float, because they may exceed an integer.
pub(super) fn bytes_of(numbers: u64, samples: u64, element: u64) -> f64 {
    numbers as f64 * samples as f64 * element as f64
}
