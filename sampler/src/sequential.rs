//! Sequential sampler: every index in ascending order.

use crate::{Indices, Sampler, SamplerError};

/// Every index of a data set in ascending order: PyTorch's `SequentialSampler`, the order of `shuffle=False`.
///
/// # Cost
///
/// Constant memory, whatever the length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequentialSampler {
    dataset_len: usize,
}

impl SequentialSampler {
    /// Creates a sampler for a data set of the given length.
    pub fn new(dataset_len: usize) -> Self {
        Self { dataset_len }
    }
}

impl Sampler for SequentialSampler {
    fn len(&self) -> usize {
        self.dataset_len
    }

    fn indices(&mut self) -> Result<Indices, SamplerError> {
        Ok(Box::new(0..self.dataset_len))
    }

    fn index_bound(&self) -> Option<usize> {
        Some(self.dataset_len)
    }
}
