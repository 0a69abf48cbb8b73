//! Training workloads of the benchmarks: one Transformer, distributed by each strategy.

mod data_parallel;
mod model;
mod pipeline;
mod run;
mod sharded;
mod tensor_parallel;
mod train;

use ::pipeline::ScheduleKind;
use serde::{Deserialize, Serialize};

pub use model::Sizes;
pub(crate) use run::run;
pub use run::{Figures, RankFigures};

/// How the model is distributed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Strategy {
    /// A copy on every rank; gradients are reduced in buckets.
    Ddp {
        /// See [`ddp::DdpConfig::bucket_bytes`].
        bucket_bytes: usize,
    },
    /// Every parameter divided over the ranks.
    Fsdp,
    /// Every layer divided over the ranks.
    TensorParallel,
    /// Consecutive blocks of layers on consecutive ranks.
    Pipeline {
        /// The schedule.
        schedule: ScheduleKind,
        /// Number of micro-batches per step.
        micro_batches: usize,
    },
}

impl Strategy {
    /// Returns data parallelism with default settings.
    pub fn ddp() -> Self {
        Self::Ddp { bucket_bytes: ddp::DdpConfig::default().bucket_bytes }
    }

    /// Returns the short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddp { .. } => "ddp",
            Self::Fsdp => "fsdp",
            Self::TensorParallel => "tensor-parallel",
            Self::Pipeline { .. } => "pipeline",
        }
    }
}

/// Training steps on random tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// How the model is distributed.
    pub strategy: Strategy,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// Rows of tokens per step, over all ranks.
    pub batch_size: usize,
    /// Steps that are not measured.
    pub warm_up: usize,
    /// Steps that are measured.
    pub steps: Steps,
}

/// How many steps are measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Steps {
    /// This number of steps.
    Count(usize),
    /// As many as take about this many seconds; at least 3.
    Seconds(f64),
}
