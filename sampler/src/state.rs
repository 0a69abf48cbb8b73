//! Where a run stands in its data: what a checkpoint keeps of a sampler.

use serde::{Deserialize, Serialize};

use crate::SamplerError;

/// Where a distributed run stands in its data set, the same for all ranks: a few numbers to keep in a checkpoint.
///
/// [`DistributedSampler::state`](crate::DistributedSampler::state) gives it,
/// [`DistributedSampler::resume`](crate::DistributedSampler::resume) takes it; so do those of [`Order`](crate::Order). It does not depend on the number of
/// ranks: an epoch's order belongs to the data set, and the ranks take turns along it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// Samples in the data set.
    pub dataset_len: usize,
    /// Seed of the epochs' orders.
    pub seed: u64,
    /// Whether epochs are shuffled.
    pub shuffle: bool,
    /// The epoch.
    pub epoch: u64,
    /// How many samples of the epoch's order all ranks together are done with; `dataset_len` or more: all.
    pub consumed: usize,
}

impl SamplerState {
    /// Whether it is of this data set length, seed and shuffling.
    pub(crate) fn check(&self, dataset_len: usize, seed: u64, shuffle: bool) -> Result<(), SamplerError> {
        agree("data set length", dataset_len, self.dataset_len)?;
        agree("seed", seed, self.seed)?;
        agree("shuffle", shuffle, self.shuffle)
    }
}

fn agree<T: PartialEq + ToString>(field: &'static str, expected: T, got: T) -> Result<(), SamplerError> {
    if expected == got {
        return Ok(());
    }
    Err(SamplerError::StateMismatch { field, expected: expected.to_string(), got: got.to_string() })
}
