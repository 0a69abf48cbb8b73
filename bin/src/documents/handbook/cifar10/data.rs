//! Loading the training and test pictures, from a folder, a file or the seed, and batching them.

use std::sync::Arc;

use candle_core::Device;
use cli::prelude::*;
use sampler::DistributedSampler;
use training::TensorFile;

use super::Cifar10Options;
use super::model::ConvNet;
use super::pictures::{Batch, Pictures};
use super::records;
use crate::documents::handbook::cifar10::synthetic::Patterns;

/// What each process creates at the start.
pub struct Setup {
    pub(super) train: Arc<Pictures>,
    pub(super) test: Arc<Pictures>,
    pub(super) variables: Variables,
}

impl Setup {
    pub(super) fn new(options: &Cifar10Options) -> Result<Self> {
        let variables = Variables::new(&options.common)?;
        let (train, test) = match (&options.data_dir, &options.common.data) {
            (Some(dir), _) => records::read(dir)?,
            (None, Some(path)) => {
                let file = TensorFile::open(path)?;
                file.only(&["x", "y", "test_x", "test_y"])?;
                (Pictures::read(&file, "x", "y")?, Pictures::read(&file, "test_x", "test_y")?)
            }
            (None, None) => variables.generator.with(|generator| {
                let patterns = Patterns::draw(generator)?;
                let train = patterns.pictures(generator, options.samples)?;
                Ok::<_, cli::error::Error>((train, patterns.pictures(generator, options.test_samples)?))
            })?,
        };
        variables.make(&options.common, ConvNet::new)?;
        Ok(Self { train: Arc::new(train), test: Arc::new(test), variables })
    }
}

/// Returns a loader for this rank's share of the pictures.
pub(super) fn loader(
    pictures: &Arc<Pictures>,
    sampler: DistributedSampler,
    batch_size: usize,
    device: &Device,
    options: LoaderOptions,
) -> Result<Loader<Pictures, Batch>> {
    let all = pictures.clone();
    let make = move |indices: Vec<usize>, device: &Device| all.batch(indices.into_iter(), device);
    options.loader(pictures.clone(), sampler, batch_size, device, make)
}
