//! What a strategy needs: memory by kind, bytes sent.

mod data;
pub(crate) mod pipeline;
mod sharded;
mod tensor;
mod ways;

use serde::Serialize;

use crate::model::Model;

pub use ways::{Lack, LeftOut};

/// A way to spread a model over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The whole model on every rank (`ddp`).
    Data,
    /// Every parameter divided over ranks, and gathered where it is needed (`fsdp`).
    ShardedData(Sharding),
    /// Layers divided over `tp` ranks, copies of that on the others (`tensor-parallel`).
    Tensor {
        /// Ranks that each layer is divided over.
        tp: usize,
        /// Whether activations between the layers are divided, too.
        sequence_parallel: bool,
    },
    /// The model cut into as many stages as there are ranks (`pipeline`).
    Pipeline,
}

/// What is divided, as `fsdp-mlp --sharding` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharding {
    /// Parameters, gradients and optimizer state.
    Full,
    /// Gradients and optimizer state; parameters stay from forward to backward.
    GradOp,
    /// All three over so many ranks; groups of these are copies of each other.
    Hybrid {
        /// Ranks that share a copy.
        shards: usize,
    },
    /// Nothing.
    None,
}

impl Sharding {
    /// Over how many of so many ranks parameters are divided.
    pub(crate) fn ranks(self, ranks: usize) -> usize {
        match self {
            Self::Full | Self::GradOp => ranks,
            Self::Hybrid { shards } => shards.clamp(1, ranks),
            Self::None => 1,
        }
    }
}

/// What is planned for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setting {
    /// Ranks.
    pub ranks: usize,
    /// Samples a step, on all ranks together.
    pub batch_size: usize,
    /// Micro-batches of a pipeline.
    pub micro_batches: usize,
    /// Bytes of a number.
    pub element: u64,
    /// Bytes of a number as sharded data parallelism gathers it, computes with it and averages its gradient.
    pub gathered: u64,
    /// Numbers that the optimizer remembers of each parameter.
    pub optimizer: u64,
}

impl Setting {
    /// Micro-batches of a pipeline that have a sample at least.
    pub(crate) fn parts(&self) -> usize {
        self.micro_batches.clamp(1, self.batch_size.max(1))
    }
}

/// Bytes on the rank that has the most, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Parameters and buffers.
    pub weights: f64,
    /// Copies of parameters that the strategy needs beside them.
    pub copies: f64,
    /// Gradients.
    pub gradients: f64,
    /// What the optimizer remembers.
    pub optimizer: f64,
    /// What forward keeps for backward.
    pub activations: f64,
}

impl Memory {
    /// All kinds.
    pub fn total(&self) -> f64 {
        self.weights + self.copies + self.gradients + self.optimizer + self.activations
    }
}

/// What a strategy needs, but for time.
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
    /// What is missing for it, where a rank has so much memory.
    pub fn lack(&self, setting: &Setting, memory: f64) -> Option<Lack> {
        if self.strategy.copies(setting.ranks) > setting.batch_size {
            return Some(Lack::Samples);
        }
        (self.memory.total() > memory).then_some(Lack::Memory)
    }
}

impl Strategy {
    /// Its name, on so many ranks.
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

    /// What it needs.
    pub fn estimate(self, model: &Model, setting: &Setting) -> Estimate {
        match self {
            Self::Data => data::estimate(model, setting),
            Self::ShardedData(sharding) => sharded::estimate(model, setting, sharding),
            Self::Tensor { tp, sequence_parallel } => tensor::estimate(model, setting, tp, sequence_parallel),
            Self::Pipeline => pipeline::estimate(model, setting),
        }
    }
}

/// Samples of a rank where a batch is divided over so many.
pub(crate) fn share(batch_size: usize, ranks: usize) -> u64 {
    batch_size.div_ceil(ranks).max(1) as u64
}

/// Bytes of so many numbers a sample, which may be more than a whole number holds.
pub(super) fn bytes_of(numbers: u64, samples: u64, element: u64) -> f64 {
    numbers as f64 * samples as f64 * element as f64
}
