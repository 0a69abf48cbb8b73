//! Training as the benches measure it: one Transformer, spread over ranks in every way that there is.

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

/// How a model is spread over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Strategy {
    /// A copy on every rank; gradients travel in buckets of so many bytes.
    Ddp {
        /// See [`ddp::DdpConfig::bucket_bytes`].
        bucket_bytes: usize,
    },
    /// Every parameter divided over the ranks.
    Fsdp,
    /// Every layer divided over the ranks.
    TensorParallel,
    /// Blocks of layers one after the other on the ranks.
    Pipeline {
        /// The order of work.
        schedule: ScheduleKind,
        /// Parts of a batch.
        micro_batches: usize,
    },
}

impl Strategy {
    /// Data parallelism as a user has it who changes nothing.
    pub fn ddp() -> Self {
        Self::Ddp { bucket_bytes: ddp::DdpConfig::default().bucket_bytes }
    }

    /// Its short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddp { .. } => "ddp",
            Self::Fsdp => "fsdp",
            Self::TensorParallel => "tensor-parallel",
            Self::Pipeline { .. } => "pipeline",
        }
    }
}

/// Steps of training, on tokens that are drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Training {
    /// How it is spread.
    pub strategy: Strategy,
    /// The model.
    pub sizes: Sizes,
    /// Rows of tokens in a step, of all ranks together.
    pub batch_size: usize,
    /// Steps that are not measured.
    pub warm_up: usize,
    /// Steps that are.
    pub steps: Steps,
}

/// How many steps are measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Steps {
    /// So many.
    Count(usize),
    /// As many as take about so long, and 3 at least.
    Seconds(f64),
}
