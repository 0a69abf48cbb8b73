//! The options of `ddp-linear`.

use std::sync::OnceLock;

use clap::Args;
use cli::prelude::*;

/// Options of `ddp-linear`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains y = w x + b on samples of y = 2 x + 3 + 0.1 noise: first in this process alone, then on
--world-size ranks with averaged gradients. Then it compares the times.

Each rank takes --batch-size samples per step, and the learning rate is multiplied by the number of
ranks, as in the from-scratch tutorial. With --keep-total-batch a rank takes --batch-size / ranks
samples, and the learning rate is not changed.

--data FILE holds the tensors x and y, both f32 of shape (samples, 1). --init and --save hold
linear.weight (1, 1) and linear.bias (1).

  girandole ddp-linear --world-size 4 --report run.html")]
pub(crate) struct DdpLinearOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    /// How batches are loaded.
    #[command(flatten)]
    pub(crate) loader: LoaderOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "10", value_parser = count)]
    pub(crate) epochs: usize,
    /// Samples per step, on each rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate of one process
    #[arg(long, default_value = "0.01", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Samples in the data set
    #[arg(long, value_name = "N", default_value = "10000", value_parser = count, conflicts_with = "data")]
    pub(crate) samples: usize,
    /// Split --batch-size over the ranks, in place of multiplying it
    #[arg(long)]
    pub(crate) keep_total_batch: bool,
    /// The run of one process, once it has trained.
    #[arg(skip)]
    pub(super) single: OnceLock<RunSeries>,
}

impl DdpLinearOptions {
    /// Returns the seconds that one process has trained.
    pub(super) fn single_s(&self) -> f64 {
        self.single.get().map_or(0.0, |single| single.seconds)
    }

    /// Checks that the total batch, if kept, has a sample for each rank.
    pub(super) fn check_batch(&self, world_size: usize) -> Result<()> {
        if self.keep_total_batch && self.batch_size < world_size {
            let help = format!(
                "with --keep-total-batch it is split over {world_size} ranks: give {world_size} or more"
            );
            return refuse("--batch-size", self.batch_size, help);
        }
        Ok(())
    }

    /// Returns the samples per step of each of `world_size` ranks.
    pub(super) fn rank_batch_size(&self, world_size: usize) -> usize {
        if self.keep_total_batch { self.batch_size / world_size } else { self.batch_size }
    }

    pub(super) fn ddp_lr(&self, world_size: usize) -> f64 {
        if self.keep_total_batch { self.lr } else { self.lr * world_size as f64 }
    }
}
