//! The options of `ddp-mlp`.

use clap::Args;
use experiment::options::{
    CheckpointOptions, CommonOptions, ElasticOptions, LoaderOptions, count, learning_rate,
};

/// Options of `ddp-mlp`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains Linear(10, 20), ReLU, Linear(20, 2) with cross-entropy, on --world-size ranks with averaged
gradients. Each rank has one random batch, the same in every epoch; rank 0 prints its loss. At the
end the model is validated: loss and accuracy over a whole set, which is divided over the ranks so
that each sample counts once.

--data FILE holds the tensors x, f32 of shape (samples, 10), and y, i64 of shape (samples) with
classes 0 and 1; they are divided over the ranks and shuffled. Optional val_x and val_y are for
validation. --init and --save hold 0.weight (20, 10), 0.bias (20), 2.weight (2, 20) and 2.bias (2).")]
pub struct DdpMlpOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    #[command(flatten)]
    pub(crate) elastic: ElasticOptions,
    /// How batches are loaded.
    #[command(flatten)]
    pub(crate) loader: LoaderOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "10", value_parser = count)]
    pub(crate) epochs: usize,
    /// Samples per step, on each rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.01", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Samples in the validation set
    #[arg(long, value_name = "N", default_value = "1000", value_parser = count, conflicts_with = "data")]
    pub(crate) validation_samples: usize,
}
