//! Data set of the Trainer tutorial: 2048 random samples of 20 features and a label.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use experiment::error::Result;
use experiment::options::LoaderOptions;
use experiment::trainer::Loader;
use sampler::{DistributedSampler, Generator, SamplerError};
use training::TensorFile;

/// Features of a sample.
pub(super) const FEATURES: usize = 20;

/// Features and label.
pub(super) type Sample = ([f32; FEATURES], f32);

/// Features (batch, 20) and labels (batch, 1).
pub(super) type Batch = (Tensor, Tensor);

/// Generates the samples one by one: features (uniform), then the label (normal).
pub(super) fn draw(generator: &mut Generator, len: usize) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    samples.try_reserve_exact(len).map_err(|_| SamplerError::OutOfMemory { what: "samples", len })?;
    for _ in 0..len {
        let (mut x, mut y) = ([0.0; FEATURES], [0.0]);
        generator.fill_rand(&mut x);
        generator.fill_randn(&mut y);
        samples.push((x, y[0]));
    }
    Ok(samples)
}

pub(super) fn read(file: &TensorFile) -> Result<Vec<Sample>> {
    let device = Device::Cpu;
    let x = file.samples("x", FEATURES, &device)?;
    file.only(&["x", "y"])?;
    let y = file.tensor("y", &[Some(x.dim(0)?), Some(1)], DType::F32, &device)?;
    let (x, y) = (x.flatten_all()?.to_vec1()?, y.flatten_all()?.to_vec1()?);
    let (x, _) = x.as_chunks::<FEATURES>();
    Ok(x.iter().copied().zip(y).collect())
}

pub(super) fn loader(
    samples: Arc<Vec<Sample>>,
    sampler: DistributedSampler,
    batches: (usize, &Device),
    options: LoaderOptions,
) -> Result<Loader<Vec<Sample>, Batch>> {
    options.loader(samples, sampler, batches, |samples, device| {
        let len = samples.len();
        let (x, y): (Vec<[f32; FEATURES]>, Vec<f32>) = samples.into_iter().unzip();
        let x = Tensor::from_vec(x.into_flattened(), (len, FEATURES), device)?;
        Ok((x, Tensor::from_vec(y, (len, 1), device)?))
    })
}
