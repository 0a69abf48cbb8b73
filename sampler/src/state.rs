//! Sampler state for checkpoints: the position of a run in its data.

use serde::{Deserialize, Serialize};

use crate::SamplerError;

/// Position of a distributed run in its data set, the same for all ranks: a few numbers to save in a checkpoint.
///
/// It is returned by [`DistributedSampler::state`](crate::DistributedSampler::state) and restored by
/// [`DistributedSampler::resume`](crate::DistributedSampler::resume), and by the same methods of
/// [`RunOrder`](crate::RunOrder). It does not depend on the number of ranks, as all ranks take turns along one order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// Number of samples in the data set.
    pub dataset_len: usize,
    /// Base seed of the epochs' orders.
    pub seed: u64,
    /// Whether epochs are shuffled.
    pub shuffle: bool,
    /// The epoch.
    pub epoch: u64,
    /// Number of samples of the epoch's order that all ranks together have finished; `dataset_len` or more means all.
    pub consumed: usize,
}

impl SamplerState {
    /// Checks that it has this data set length, seed and shuffling.
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
