//! The options of `ddp-trainer`.

use clap::{Args, ValueEnum};
use experiment::options::{
    CheckpointOptions, CommonOptions, ElasticOptions, LoaderOptions, count, learning_rate,
};

/// What is minimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LossKind {
    /// The mean squared error.
    Mse,
    /// Cross-entropy over the one output, as in the tutorial: always 0.
    Document,
}

/// Options of `ddp-trainer`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains Linear(20, 1) on random samples, on --world-size ranks with averaged gradients. Each rank
prints one line per epoch, with the samples of its first batch and the number of its steps.

--data FILE holds the tensors x (samples, 20) and y (samples, 1), both f32. --init and --save hold
weight (1, 20) and bias (1).")]
pub struct DdpTrainerOptions {
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
    #[arg(long, value_name = "N", default_value = "5", value_parser = count)]
    pub(crate) epochs: usize,
    /// Samples per step, on each rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.001", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Samples in the data set
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count, conflicts_with = "data")]
    pub(crate) samples: usize,
    /// Loss to minimise
    #[arg(long, value_enum, default_value = "mse")]
    pub(crate) loss: LossKind,
}
