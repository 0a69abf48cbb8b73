//! Cases of the scaling report: a strategy, a number of ranks and a batch size.

use serde::{Deserialize, Serialize};

use super::Options;
use super::kind::{Kind, micro_batches};
use crate::workload::{Steps, Training};

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
