//! The options of `cifar10`.

use std::path::PathBuf;

use clap::Args;
use cli::prelude::*;

use super::pictures::PICTURE_BYTES;

/// The handbook's number of batches between printed losses.
const PRINT_EVERY: usize = 2000;
/// The same for random pictures, where an epoch has a few hundred batches.
const PRINT_EVERY_DRAWN: usize = 50;

/// Options of `cifar10`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a net of two convolutions and three linear layers on pictures of ten classes, on --world-size
ranks with averaged gradients. Then it tests the net on all ranks, on every test picture once.

--data-dir DIR is a folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, or a folder
that contains cifar-10-batches-bin: the content of cifar-10-binary.tar.gz. Without it the pictures are
random, drawn from the seed.

--data FILE holds the tensors x and test_x, u8 of shape (samples, 3, 32, 32), and their classes y
and test_y, u8 of shape (samples), 0 to 9. --init and --save hold conv1, conv2, fc1, fc2 and fc3, each
with .weight and .bias. The file that --save wrote is loaded again before the test.")]
pub struct Cifar10Options {
    #[command(flatten)]
    pub(super) common: CommonOptions,
    #[command(flatten)]
    pub(super) checkpoints: CheckpointOptions,
    #[command(flatten)]
    pub(super) elastic: ElasticOptions,
    /// Folder with the binary version of CIFAR-10
    #[arg(long, value_name = "DIR", conflicts_with_all = ["data", "samples", "test_samples"], help_heading = "Files")]
    pub(super) data_dir: Option<PathBuf>,
    /// File for a grid of test pictures with their true and predicted classes
    #[arg(long, value_name = "FILE.png", help_heading = "Files")]
    pub(super) picture: Option<PathBuf>,
    /// Largest number of pictures in that grid
    #[arg(long, value_name = "N", default_value = "16", value_parser = count, requires = "picture", help_heading = "Files")]
    pub(super) pictures: usize,
    /// How batches are loaded.
    #[command(flatten)]
    pub(super) loader: LoaderOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "2", value_parser = count)]
    pub(super) epochs: usize,
    /// Pictures per step, on each rank
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub(super) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.01", value_parser = learning_rate)]
    pub(super) lr: f64,
    /// Momentum of SGD
    #[arg(long, default_value = "0.1", value_parser = learning_rate)]
    pub(super) momentum: f64,
    /// Batches between printed losses [default: 2000, 50 if random]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(super) print_every: Option<usize>,
    /// Random pictures to train on, without other data
    #[arg(long, value_name = "N", default_value = "2000", value_parser = count, conflicts_with = "data")]
    pub(super) samples: usize,
    /// Random pictures to test with, without other data
    #[arg(long, value_name = "N", default_value = "500", value_parser = count, conflicts_with = "data")]
    pub(super) test_samples: usize,
}

impl Cifar10Options {
    /// Whether the pictures are generated from the seed.
    pub(super) fn draws(&self) -> bool {
        self.data_dir.is_none() && self.common.data.is_none()
    }

    /// Checks that the generated pictures fit in memory.
    pub(super) fn check_samples(&self, world_size: usize) -> Result<()> {
        let check = |option, samples| {
            memory_check::check_samples(option, samples, PICTURE_BYTES, &self.common, world_size)
        };
        match self.draws() {
            false => Ok(()),
            true => {
                check("--samples", self.samples).and_then(|()| check("--test-samples", self.test_samples))
            }
        }
    }

    pub(super) fn print_every(&self) -> usize {
        self.print_every.unwrap_or(if self.draws() { PRINT_EVERY_DRAWN } else { PRINT_EVERY })
    }
}
