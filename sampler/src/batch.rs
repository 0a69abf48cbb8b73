//! Batches of a sampler's indices.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::fetch::panic_message;
use crate::{Indices, Sampler, SamplerError};

/// Batches of a sampler's indices: PyTorch's `BatchSampler`.
///
/// ```
/// use sampler::{BatchSampler, SequentialSampler};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let mut batches = BatchSampler::new(SequentialSampler::new(5), 2, false)?;
/// let batches: Vec<Vec<usize>> = batches.batches()?.collect::<Result<_, _>>()?;
/// assert_eq!(batches, [vec![0, 1], vec![2, 3], vec![4]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BatchSampler<S> {
    sampler: S,
    batch_size: usize,
    drop_last: bool,
}

impl<S: Sampler> BatchSampler<S> {
    /// Creates batches of `batch_size` indices; `drop_last` drops a smaller last one.
    ///
    /// # Errors
    ///
    /// If the batch size is 0.
    pub fn new(sampler: S, batch_size: usize, drop_last: bool) -> Result<Self, SamplerError> {
        if batch_size == 0 {
            return Err(SamplerError::ZeroBatchSize);
        }
        Ok(Self { sampler, batch_size, drop_last })
    }

    /// Number of batches in the next epoch.
    pub fn len(&self) -> usize {
        let samples = self.sampler.len();
        if self.drop_last { samples / self.batch_size } else { samples.div_ceil(self.batch_size) }
    }

    /// Whether the next epoch has no batch.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Begins an epoch.
    ///
    /// # Errors
    ///
    /// If the sampler cannot make its order.
    pub fn batches(&mut self) -> Result<BatchIndices, SamplerError> {
        let indices = self.sampler.indices()?;
        Ok(BatchIndices {
            indices,
            batch_size: self.batch_size,
            drop_last: self.drop_last,
            batch: 0,
            over: false,
        })
    }

    /// The inner sampler.
    pub fn sampler(&self) -> &S {
        &self.sampler
    }

    /// The inner sampler, to set its epoch or resume it.
    pub(crate) fn sampler_mut(&mut self) -> &mut S {
        &mut self.sampler
    }
}

/// One epoch's batches of indices.
///
/// An item is an error only if the sampler panics or memory for a batch is exhausted; the epoch ends there.
pub struct BatchIndices {
    indices: Indices,
    batch_size: usize,
    drop_last: bool,
    /// Index of the next batch.
    batch: usize,
    over: bool,
}

/// Indices of one batch after another.
pub(crate) trait RowBatches: Send {
    /// Replaces the content of `out` by the next batch. Returns false if there is none.
    fn next_into(&mut self, out: &mut Vec<usize>) -> Result<bool, SamplerError>;
}

impl RowBatches for BatchIndices {
    fn next_into(&mut self, out: &mut Vec<usize>) -> Result<bool, SamplerError> {
        out.clear();
        if self.over {
            return Ok(false);
        }
        let Self { indices, batch_size, .. } = self;
        let filled = catch_unwind(AssertUnwindSafe(|| {
            let len = indices.size_hint().0.min(*batch_size);
            out.try_reserve(len).map_err(|_| SamplerError::OutOfMemory { what: "a batch's indices", len })?;
            out.extend(indices.take(*batch_size));
            Ok(())
        }));
        let result = filled.unwrap_or_else(|payload| {
            Err(SamplerError::SamplerPanicked { batch: self.batch, message: panic_message(payload) })
        });
        self.batch += 1;
        self.over = result.is_err() || out.len() < self.batch_size;
        result?;
        let wanted = !(self.over && self.drop_last);
        Ok(wanted && !out.is_empty())
    }
}

impl Iterator for BatchIndices {
    type Item = Result<Vec<usize>, SamplerError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut out = Vec::new();
        match self.next_into(&mut out) {
            Ok(true) => Some(Ok(out)),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

impl std::fmt::Debug for BatchIndices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchIndices")
            .field("batch_size", &self.batch_size)
            .field("batch", &self.batch)
            .finish()
    }
}
