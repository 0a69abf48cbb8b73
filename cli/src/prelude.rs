//! What most experiments use: `use cli::prelude::*;`.

pub use report::metrics::MetricsWriter;
pub use report::{Report, RunSeries, counted, fact};

pub use crate::console::{note, say};
pub use crate::error::{Result, refuse};
pub use crate::options::{
    CheckpointOptions, CommonOptions, ElasticOptions, LoaderOptions, count, learning_rate, probability,
    value_name,
};
pub use crate::rank::{Outcome, Rank};
pub use crate::trainer::{
    DataParallel, Epoch, Epochs, Loader, Losses, Means, Observer, Step, StepRandom, Trainer,
};
pub use crate::variables::Variables;
pub use crate::{Command, Experiment, memory_check, options_of, settings};
