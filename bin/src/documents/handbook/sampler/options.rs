//! The options of `sampler`.

use clap::{Args, ValueEnum};
use cli::memory_check::INDEX_BYTES;
use cli::options::{seed, workers};
use cli::prelude::*;
use cli::start::check_world_size;
use sampler::{DistributedSampler, DistributedSamplerConfig};

/// What becomes of the last samples where the ranks do not divide the data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Tail {
    /// Repeat the first samples, so that all ranks have equally many.
    Pad,
    /// Leave the last samples out, so that all ranks have equally many.
    Drop,
    /// Give the first ranks one sample more.
    Uneven,
}

/// Options of `sampler`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Distributes --samples samples to --world-size ranks, --epochs times, and loads them in batches, as the
training of the PyTorch handbook does. Then it prints the handbook's comparison: the order of a plain
sampler in one process, and what each rank gets from a distributed one, of --compared samples. Nothing
is trained, and no rank is started.

With the same seed all indices are PyTorch's: those of torch.manual_seed, of the handbook's data set,
and of its samplers.")]
pub(crate) struct SamplerOptions {
    /// Ranks to distribute samples to
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub(super) world_size: usize,
    /// Seed of the orders and of the compared data set
    #[arg(long, value_name = "N", default_value = "42", value_parser = seed)]
    pub(super) seed: u64,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "3", value_parser = count)]
    pub(super) epochs: usize,
    /// Samples in the data set
    #[arg(long, value_name = "N", default_value = "1000", value_parser = count)]
    pub(super) samples: usize,
    /// Samples in the data set of the comparison
    #[arg(long, value_name = "N", default_value = "100", value_parser = count)]
    pub(super) compared: usize,
    /// Samples per batch, on each rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(super) batch_size: usize,
    /// Threads per rank that load batches ahead
    #[arg(long, value_name = "N", default_value = "2", value_parser = workers)]
    pub(super) num_workers: usize,
    /// Distribute samples in ascending order
    #[arg(long)]
    pub(super) no_shuffle: bool,
    /// What to do with samples that the ranks do not divide
    #[arg(long, value_enum, default_value = "pad")]
    pub(super) tail: Tail,
    /// Also load the last batch if it is not full
    #[arg(long)]
    pub(super) keep_last: bool,
}

impl SamplerOptions {
    pub(super) fn check(&self) -> Result<()> {
        check_world_size(self.world_size)?;
        // Per sample: its owner, and its index in a shuffled order.
        let each = size_of::<u32>() + if self.no_shuffle { 0 } else { INDEX_BYTES };
        memory_check::check_data("--samples", self.samples, self.samples as f64 * each as f64, 1)
    }

    /// Returns one rank's sampler for a data set of `dataset_len` samples.
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
