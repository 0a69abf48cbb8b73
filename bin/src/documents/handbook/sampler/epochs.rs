//! The handbook's `train_with_sampler` without the training: a loader for each rank, over several epochs.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use cli::prelude::*;
use sampler::{BoxError, DataLoader, DataLoaderConfig, Dataset, DistributedSampler, Sampler};

use super::coverage::Coverage;
use super::{SamplerOptions, inspect_indices};

/// The handbook prints every so many batches.
const SAY_EVERY: usize = 5;

/// A data set whose samples are their own indices.
struct Numbers(usize);

impl Dataset for Numbers {
    type Item = usize;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize) -> std::result::Result<usize, BoxError> {
        Ok(index)
    }
}

type Loader = DataLoader<Numbers, Vec<usize>, DistributedSampler>;

/// The loaders and counters; created before anything is printed, since they may not fit in memory.
pub(super) struct Epochs {
    loaders: Vec<Loader>,
    coverage: Coverage,
}

impl Epochs {
    pub(super) fn new(options: &SamplerOptions) -> Result<Self> {
        let coverage = Coverage::new(options.samples)?;
        let loaders = (0..options.world_size).map(|rank| loader(options, rank)).collect::<Result<_>>()?;
        Ok(Self { loaders, coverage })
    }

    pub(super) fn run(self, options: &SamplerOptions) -> Result<()> {
        let Self { mut loaders, mut coverage } = self;
        say(format_args!(
            "===== training with a distributed sampler ({}) =====",
            counted(options.world_size, "rank")
        ))?;
        for (rank, loader) in loaders.iter().enumerate() {
            say(format_args!("Rank {rank}: Sampler has {} samples", loader.sampler().len()))?;
        }
        // Stored as hashes: each order is as large as the data set.
        let mut orders = HashSet::new();
        for epoch in 0..options.epochs {
            coverage.clear();
            let mut order = DefaultHasher::new();
            for (rank, loader) in loaders.iter_mut().enumerate() {
                loader.set_epoch(epoch as u64);
                let (_, first) = inspect_indices(loader.sampler().iter()?, 10, |index| {
                    coverage.add(rank, index);
                    index.hash(&mut order);
                });
                go_through(options, rank, epoch, loader)?;
                say(format_args!("Rank {rank}, Epoch {epoch}: first 10 indices: {first:?}"))?;
            }
            say(format_args!("Epoch {epoch}: {coverage}"))?;
            orders.insert(order.finish());
        }
        let orders = counted(orders.len(), if orders.len() == 1 { "order" } else { "different order" });
        say(format_args!("{}, {orders}", counted(options.epochs, "epoch")))
    }
}

fn loader(options: &SamplerOptions, rank: usize) -> Result<Loader> {
    let config = DataLoaderConfig {
        batch_size: options.batch_size,
        drop_last: !options.keep_last,
        num_workers: options.num_workers,
        ..DataLoaderConfig::default()
    };
    let sampler = options.sampler(options.samples, rank)?;
    Ok(DataLoader::new(Arc::new(Numbers(options.samples)), sampler, Ok, config)?)
}

/// Runs one epoch of one rank and prints it as the handbook does.
fn go_through(options: &SamplerOptions, rank: usize, epoch: usize, loader: &mut Loader) -> Result<()> {
    let mut processed = 0;
    for (batch, samples) in loader.batches()?.enumerate() {
        let samples = samples?.len();
        processed += samples;
        if batch.is_multiple_of(SAY_EVERY) {
            let first = batch * options.batch_size;
            say(format_args!(
                "Rank {rank}, Epoch {epoch}, Batch {batch}: Sample indices range: {first} to {}",
                first + samples - 1
            ))?;
        }
    }
    say(format_args!("Rank {rank}, Epoch {epoch} processed {processed} samples"))
}
