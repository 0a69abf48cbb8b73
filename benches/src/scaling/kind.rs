//! The strategies of the scaling report, by the names that `--strategies` takes.

use clap::ValueEnum;
use pipeline::ScheduleKind;
use serde::{Deserialize, Serialize};

use crate::workload::Strategy;

/// Rows per micro-batch of a pipeline.
const MICRO_BATCH: usize = 2;

/// A strategy by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A copy of the model on every rank
    Ddp,
    /// Every parameter divided over the ranks
    Fsdp,
    /// Every layer divided over the ranks
    TensorParallel,
    /// Blocks of layers one after the other on the ranks: 1F1B
    Pipeline,
}

impl Kind {
    /// Returns the name as `--strategies` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddp => "ddp",
            Self::Fsdp => "fsdp",
            Self::TensorParallel => "tensor-parallel",
            Self::Pipeline => "pipeline",
        }
    }

    pub(super) fn strategy(self, batch_size: usize) -> Strategy {
        match self {
            Self::Ddp => Strategy::ddp(),
            Self::Fsdp => Strategy::Fsdp,
            Self::TensorParallel => Strategy::TensorParallel,
            Self::Pipeline => {
                let micro_batches = micro_batches(batch_size);
                Strategy::Pipeline { schedule: ScheduleKind::OneFOneB, micro_batches }
            }
        }
    }
}

/// Returns the number of micro-batches of a pipeline.
pub(super) fn micro_batches(batch_size: usize) -> usize {
    if batch_size.is_multiple_of(MICRO_BATCH) { batch_size / MICRO_BATCH } else { 1 }
}
