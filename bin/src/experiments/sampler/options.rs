//! The options of `sampler`.

use clap::{Args, ValueEnum};
use sampler::{DistributedSampler, DistributedSamplerConfig};

use crate::error::Result;
use crate::options::{count, seed, workers};
use crate::room::{self, PLACE};
use crate::start::check_world_size;

/// What becomes of the last samples where the ranks do not divide the data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Tail {
    /// The first samples come again, so that all ranks have equally many.
    Pad,
    /// The last samples are left out, so that all ranks have equally many.
    Drop,
    /// The first ranks have one more.
    Uneven,
}

/// Options of `sampler`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
First --samples samples are dealt out to --world-size ranks, --epochs times, and loaded in batches,
as the training of the PyTorch handbook does; then the handbook's comparison: the order of a plain sampler
in one process, and what each rank gets from a distributed one, of --compared samples. Nothing is
trained and no rank is started.

With the same seed all indices are PyTorch's: of torch.manual_seed, the handbook's data set, and its
samplers.")]
pub struct SamplerOptions {
    /// How many ranks the samples are dealt out to
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, allow_negative_numbers = true)]
    pub(super) world_size: usize,
    /// Seed of the orders, and of the data set that is compared
    #[arg(long, value_name = "N", default_value = "42", value_parser = seed, allow_negative_numbers = true)]
    pub(super) seed: u64,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "3", value_parser = count, allow_negative_numbers = true)]
    pub(super) epochs: usize,
    /// Samples in the data set that the ranks go through
    #[arg(long, value_name = "N", default_value = "1000", value_parser = count, allow_negative_numbers = true)]
    pub(super) samples: usize,
    /// Samples in the data set of the comparison
    #[arg(long, value_name = "N", default_value = "100", value_parser = count, allow_negative_numbers = true)]
    pub(super) compared: usize,
    /// Samples in a batch of each rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count, allow_negative_numbers = true)]
    pub(super) batch_size: usize,
    /// Threads that load the batches of a rank ahead; they change nothing of what is printed
    #[arg(long, value_name = "N", default_value = "2", value_parser = workers, allow_negative_numbers = true)]
    pub(super) num_workers: usize,
    /// Deal the samples out in ascending order
    #[arg(long)]
    pub(super) no_shuffle: bool,
    /// What becomes of the last samples where the ranks do not divide them
    #[arg(long, value_enum, default_value = "pad")]
    pub(super) tail: Tail,
    /// Load a last batch that is not full, too
    #[arg(long)]
    pub(super) keep_last: bool,
}

impl SamplerOptions {
    pub(super) fn check(&self) -> Result<()> {
        check_world_size(self.world_size)?;
        // Which rank has a sample, and its place in a shuffled order.
        let each = size_of::<u32>() + if self.no_shuffle { 0 } else { PLACE };
        room::check_data("--samples", self.samples, self.samples as f64 * each as f64, 1)?;
        // The comparison draws its data set.
        let each = super::comparison::FEATURES * size_of::<f32>();
        room::check_data("--compared", self.compared, self.compared as f64 * each as f64, 1)
    }

    /// One rank's sampler of so many samples.
    pub(super) fn sampler(&self, dataset_len: usize, rank: usize) -> Result<DistributedSampler> {
        let tail = match self.tail {
            Tail::Pad => sampler::Tail::Pad,
            Tail::Drop => sampler::Tail::Drop,
            Tail::Uneven => sampler::Tail::Uneven,
        };
        Ok(DistributedSampler::new(DistributedSamplerConfig {
            dataset_len,
            num_replicas: self.world_size,
            rank,
            shuffle: !self.no_shuffle,
            seed: self.seed,
            tail,
        })?)
    }
}
