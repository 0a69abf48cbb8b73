//! Data and initial weights of the from-scratch tutorial, from the seed or from files.

use std::sync::Arc;

use candle_core::Tensor;
use cli::memory_check::INDEX_BYTES;
use cli::prelude::*;
use sampler::{DataLoader, Sampler};
use training::TensorFile;

use super::model::{self, Sample, SimpleModel};
use super::options::DdpLinearOptions;
use crate::documents::shared::python::Fixed;

/// Bytes per sample in each process.
pub(super) const SAMPLE_BYTES: usize = size_of::<Sample>() + INDEX_BYTES;

/// What each process creates at the start, identical on every rank.
pub(crate) struct Setup {
    samples: Arc<Vec<Sample>>,
    /// Their generator is used in this order: data, weights, the sample order of the single process.
    pub(super) variables: Variables,
}

/// The inputs and labels of one step, each of shape (batch, 1).
pub(super) type Batch = (Tensor, Tensor);

impl Setup {
    pub(super) fn new(options: &DdpLinearOptions) -> Result<Self> {
        let variables = Variables::new(&options.common)?;
        let samples = match &options.common.data {
            Some(path) => model::read(&TensorFile::open(path)?)?,
            None => variables.generator.with(|generator| model::draw(generator, options.samples))?,
        };
        variables.make(&options.common, SimpleModel::new)?;
        Ok(Self { samples: Arc::new(samples), variables })
    }

    pub(super) fn len(&self) -> usize {
        self.samples.len()
    }

    /// Returns a loader in the order of a sampler.
    pub(super) fn loader<S: Sampler>(
        &self,
        sampler: S,
        batch_size: usize,
        options: LoaderOptions,
    ) -> Result<DataLoader<Vec<Sample>, Batch, S>> {
        options.loader(
            self.samples.clone(),
            sampler,
            batch_size,
            &self.variables.device,
            |samples, device| {
                let shape = (samples.len(), 1);
                let (x, y): (Vec<f32>, Vec<f32>) = samples.into_iter().unzip();
                Ok((Tensor::from_vec(x, shape, device)?, Tensor::from_vec(y, shape, device)?))
            },
        )
    }

    /// Prints the current weight and bias.
    pub(super) fn say_parameters(&self) -> Result<()> {
        let builder = self.variables.builder().pp("linear");
        let weight = builder.get((1, 1), "weight")?.flatten_all()?.to_vec1::<f32>()?[0];
        let bias = builder.get(1, "bias")?.to_vec1::<f32>()?[0];
        let (weight, bias) = (Fixed::<4>(weight.into()), Fixed::<4>(bias.into()));
        say(format_args!("linear.weight: {weight}\nlinear.bias: {bias}"))
    }
}
