//! Cases of the scaling report: a strategy, a number of ranks and a batch size.

use clap::ValueEnum;
use pipeline::ScheduleKind;
use serde::{Deserialize, Serialize};

use super::Options;
use crate::workload::{Steps, Strategy, Training};

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

    fn strategy(self, batch_size: usize) -> Strategy {
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

fn micro_batches(batch_size: usize) -> usize {
    if batch_size.is_multiple_of(MICRO_BATCH) { batch_size / MICRO_BATCH } else { 1 }
}

/// A run of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// The strategy.
    pub strategy: Kind,
    /// Number of ranks.
    pub ranks: usize,
    /// Rows of tokens per step, over all ranks.
    pub batch_size: usize,
}

impl Case {
    /// Returns all cases of weak and strong scaling, without duplicates.
    pub fn all(options: &Options) -> Vec<Self> {
        let ranks = options.ranks();
        let most = ranks.last().copied().unwrap_or(1);
        let mut all = Vec::new();
        for &strategy in &options.strategies {
            for &ranks in &ranks {
                for batch_size in [options.batch_size * ranks, options.batch_size * most] {
                    let case = Self { strategy, ranks, batch_size };
                    if !all.contains(&case) {
                        all.push(case);
                    }
                }
            }
        }
        all
    }

    /// Returns the number of micro-batches, for a pipeline.
    pub(super) fn micro_batches(&self) -> usize {
        micro_batches(self.batch_size)
    }

    pub(super) fn training(&self, options: &Options) -> Training {
        let strategy = self.strategy.strategy(self.batch_size);
        let steps = Steps::Seconds(options.seconds);
        Training { strategy, sizes: options.sizes(), batch_size: self.batch_size, warm_up: 2, steps }
    }
}
