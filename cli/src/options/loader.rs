//! Options of the data loader.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use clap::Args;
use sampler::{BoxError, DataLoader, DataLoaderConfig, Dataset, Sampler};

use crate::error::Result;

/// Maximum number of worker threads; more would be idle.
const MOST_WORKERS: usize = 256;

/// Options of the data loader of each rank. They change no number.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct LoaderOptions {
    /// Threads per rank that load batches ahead
    ///
    /// With 0, each batch is loaded when it is needed.
    #[arg(long, value_name = "N", default_value = "0", value_parser = workers)]
    pub num_workers: usize,
    /// Copy batches to CUDA devices from page-locked memory (faster)
    #[arg(long)]
    pub pin_memory: bool,
}

impl LoaderOptions {
    /// Creates a loader of a data set; `make` converts the samples of a batch to tensors on the given device.
    ///
    /// # Errors
    /// A batch size of 0; a sampler that does not fit the samples.
    pub fn loader<D: Dataset + 'static, S: Sampler>(
        self,
        dataset: Arc<D>,
        sampler: S,
        batch_size: usize,
        device: &Device,
        make: impl Fn(Vec<D::Item>, &Device) -> candle_core::Result<(Tensor, Tensor)> + Send + Sync + 'static,
    ) -> Result<DataLoader<D, (Tensor, Tensor), S>> {
        let Self { num_workers, pin_memory } = self;
        let device = device.clone();
        let collate = move |samples: Vec<D::Item>| -> std::result::Result<(Tensor, Tensor), BoxError> {
            if !pin_memory {
                return Ok(make(samples, &device)?);
            }
            let (x, y) = make(samples, &Device::Cpu)?;
            Ok((comm::internal::upload_pinned(&x, &device)?, comm::internal::upload_pinned(&y, &device)?))
        };
        let config = DataLoaderConfig { batch_size, num_workers, ..DataLoaderConfig::default() };
        Ok(DataLoader::new(dataset, sampler, collate, config)?)
    }
}

/// Parses a number of worker threads.
///
/// # Errors
/// What is accepted.
pub fn workers(text: &str) -> std::result::Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= MOST_WORKERS);
    number.ok_or_else(|| format!("give a whole number, 0 to {MOST_WORKERS}"))
}
