//! Data of the PyTorch handbook's DDP example: one random batch per rank, and a validation set.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Device;
use cli::prelude::*;
use sampler::{BoxError, Dataset, Generator};
use training::TensorFile;

use super::DdpMlpOptions;
use super::model::{Batch, Sample, batch, draw, read};

/// Training samples, as the distributed sampler indexes them.
#[derive(Debug, Clone)]
pub(super) struct Samples {
    samples: Vec<Sample>,
    /// Number of ranks that hold `samples.len()` samples of their own. The data set then has `owners` times as many
    /// indices, and the sampler's round-robin order gives each rank all of its own samples.
    owners: usize,
}

impl Dataset for Samples {
    type Item = Sample;

    fn len(&self) -> usize {
        self.samples.len() * self.owners
    }

    fn get(&self, index: usize) -> std::result::Result<Sample, BoxError> {
        Dataset::get(&self.samples, index / self.owners)
    }
}

/// The training and validation data that are the same on every rank.
#[derive(Debug, Clone)]
pub(super) struct Sets {
    /// From a file; `None` if each rank generates its own.
    train: Option<Vec<Sample>>,
    validation: Vec<Sample>,
}

impl Sets {
    pub(super) fn read(file: &TensorFile) -> Result<Self> {
        file.only(&["x", "y", "val_x", "val_y"])?;
        let train = read(file, "x", "y")?;
        let own = file.names().iter().any(|name| name.starts_with("val_"));
        let validation = if own { read(file, "val_x", "val_y")? } else { train.clone() };
        Ok(Self { train: Some(train), validation })
    }

    pub(super) fn draw(generator: &mut Generator, validation_samples: usize) -> Result<Self> {
        Ok(Self { train: None, validation: draw(generator, validation_samples)? })
    }

    pub(super) fn validation_len(&self) -> usize {
        self.validation.len()
    }

    pub(super) fn validation(&self, range: Range<usize>, device: &Device) -> Result<Batch> {
        Ok(batch(&self.validation[range], device)?)
    }

    /// Returns the loader of this rank's batches.
    pub(super) fn loader(
        &self,
        options: &DdpMlpOptions,
        rank: &Rank,
        device: &Device,
    ) -> Result<Loader<Samples, Batch>> {
        let samples = match &self.train {
            Some(samples) => Samples { samples: samples.clone(), owners: 1 },
            None => {
                let mut generator = Generator::new(options.common.seed.wrapping_add(rank.comm.rank() as u64));
                let samples = draw(&mut generator, options.batch_size)?;
                Samples { samples, owners: rank.comm.world_size() }
            }
        };
        let sampler = rank.sampler(samples.len(), self.train.is_some())?;
        let make = |samples: Vec<Sample>, device: &Device| batch(&samples, device);
        options.loader.loader(Arc::new(samples), sampler, options.batch_size, device, make)
    }
}
