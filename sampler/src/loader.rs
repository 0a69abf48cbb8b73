//! Data loader: batches of samples in sampler order.

use std::sync::Arc;

use crate::batch::RowBatches;
use crate::fetch::{Collate, Fetch, Loaded};
use crate::workers::Workers;
use crate::{BatchIndices, BatchSampler, BoxError, Dataset, Sampler, SamplerError};

/// Configuration of a [`DataLoader`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataLoaderConfig {
    /// Number of samples in a batch. Default 1.
    pub batch_size: usize,
    /// Whether a smaller last batch is dropped. Default false.
    pub drop_last: bool,
    /// Number of threads that prefetch batches; 0 loads each batch on the calling thread, when it is requested.
    /// Default 0.
    pub num_workers: usize,
    /// Maximum number of batches being loaded or waiting, per worker. Ignored without workers. Default 2.
    pub prefetch_factor: usize,
}

impl Default for DataLoaderConfig {
    fn default() -> Self {
        Self { batch_size: 1, drop_last: false, num_workers: 0, prefetch_factor: 2 }
    }
}

/// Batches of a data set's samples, always in sampler order, with any number of workers.
///
/// `B` is the collate function's result for a batch's samples.
///
/// # Cost
///
/// Without workers a batch costs one allocation in addition to data set and collate. With workers at most
/// `num_workers * prefetch_factor` batches are stored, besides the one in use; each epoch starts its own threads.
///
/// ```
/// use std::sync::Arc;
/// use sampler::{DataLoader, DataLoaderConfig, SequentialSampler};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let dataset = Arc::new(vec![1.0f32, 2.0, 3.0, 4.0, 5.0]);
/// let config = DataLoaderConfig { batch_size: 2, num_workers: 2, ..Default::default() };
/// let sum = |items: Vec<f32>| Ok(items.iter().sum::<f32>());
/// let mut loader = DataLoader::new(dataset, SequentialSampler::new(5), sum, config)?;
/// let sums = loader.batches()?.collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(sums, [3.0, 7.0, 5.0]);
/// # Ok(())
/// # }
/// ```
pub struct DataLoader<D: Dataset, B, S = Box<dyn Sampler>> {
    fetch: Fetch<D, B>,
    sampler: BatchSampler<S>,
    config: DataLoaderConfig,
}

impl<D, B, S> DataLoader<D, B, S>
where
    D: Dataset + 'static,
    B: Send + 'static,
    S: Sampler,
{
    /// Creates a loader of the data set's samples in the sampler's order.
    ///
    /// # Errors
    ///
    /// If the batch size is 0, or the prefetch factor is 0 with workers; if the sampler is for a longer data set.
    pub fn new(
        dataset: Arc<D>,
        sampler: S,
        collate: impl Fn(Vec<D::Item>) -> Result<B, BoxError> + Send + Sync + 'static,
        config: DataLoaderConfig,
    ) -> Result<Self, SamplerError> {
        let dataset_len = dataset.len();
        if let Some(bound) = sampler.index_bound().filter(|&bound| bound > dataset_len) {
            return Err(SamplerError::SamplerExceedsDataset { bound, dataset_len });
        }
        if config.num_workers > 0 && config.prefetch_factor == 0 {
            return Err(SamplerError::ZeroPrefetch { num_workers: config.num_workers });
        }
        let sampler = BatchSampler::new(sampler, config.batch_size, config.drop_last)?;
        let collate: Arc<Collate<D::Item, B>> = Arc::new(collate);
        Ok(Self { fetch: Fetch { dataset, collate }, sampler, config })
    }

    /// Number of batches in the next epoch.
    pub fn len(&self) -> usize {
        self.sampler.len()
    }

    /// Whether the next epoch has no batch.
    pub fn is_empty(&self) -> bool {
        self.sampler.is_empty()
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &DataLoaderConfig {
        &self.config
    }

    /// The data set.
    pub fn dataset(&self) -> &Arc<D> {
        &self.fetch.dataset
    }

    /// The sampler.
    pub fn sampler(&self) -> &S {
        self.sampler.sampler()
    }

    /// The sampler, to resume it.
    pub fn sampler_mut(&mut self) -> &mut S {
        self.sampler.sampler_mut()
    }

    /// Sets the epoch that [`batches`](Self::batches) begins next.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.sampler_mut().set_epoch(epoch);
    }

    /// Begins an epoch, and starts its workers if there are any. Epochs are independent: one may begin before another
    /// has ended.
    ///
    /// # Errors
    ///
    /// If the sampler cannot make its order, or a thread cannot be started.
    pub fn batches(&mut self) -> Result<Batches<D, B>, SamplerError> {
        let indices = self.sampler.batches()?;
        let fetch = self.fetch.clone();
        let source = if self.config.num_workers == 0 {
            BatchSource::Caller { fetch, indices, batch: 0, buffer: Vec::new() }
        } else {
            let window = self.config.num_workers.saturating_mul(self.config.prefetch_factor);
            BatchSource::Workers(Workers::start(fetch, Box::new(indices), self.config.num_workers, window)?)
        };
        Ok(Batches { source, samples: 0 })
    }
}

/// One epoch of a [`DataLoader`].
///
/// If a sample or the collate function fails or panics, the iterator returns an error in place of the batch; later
/// batches are not affected, so the caller may skip it. Only a panicking *sampler* ends the epoch, after its error.
/// (With `panic = "abort"` a panic ends the program.)
///
/// Dropping it early stops and joins its workers; each finishes its current sample or collate call first.
pub struct Batches<D: Dataset, B> {
    source: BatchSource<D, B>,
    samples: usize,
}

enum BatchSource<D: Dataset, B> {
    Caller { fetch: Fetch<D, B>, indices: BatchIndices, batch: usize, buffer: Vec<usize> },
    Workers(Workers<D, B>),
}

impl<D: Dataset, B> Batches<D, B> {
    /// Number of samples in the batches returned so far, including those that failed, for
    /// [`DistributedSampler::state`](crate::DistributedSampler::state). Prefetched batches do not count.
    pub fn samples(&self) -> usize {
        self.samples
    }
}

impl<D: Dataset, B> Iterator for Batches<D, B> {
    type Item = Result<B, SamplerError>;

    fn next(&mut self) -> Option<Self::Item> {
        let loaded = match &mut self.source {
            BatchSource::Workers(workers) => workers.next()?,
            BatchSource::Caller { fetch, indices, batch, buffer } => match indices.next_into(buffer) {
                Ok(false) => return None,
                Err(error) => Loaded { batch: Err(error), samples: 0 },
                Ok(true) => {
                    let loaded = fetch.fetch(*batch, buffer, || false)?;
                    *batch += 1;
                    Loaded { batch: loaded, samples: buffer.len() }
                }
            },
        };
        self.samples += loaded.samples;
        Some(loaded.batch)
    }
}
