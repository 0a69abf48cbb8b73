//! Distributed sampler: divides a data set among ranks, in PyTorch's order.

use crate::permutation::Permutation;
use crate::tail::share_len;
use crate::{Indices, Sampler, SamplerError, SamplerState, Tail};

/// How a data set is divided among ranks. All ranks need the same values except `rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedSamplerConfig {
    /// Number of samples in the data set. Default 0.
    pub dataset_len: usize,
    /// Number of ranks that share it: the world size, or that of the data-parallel group. Default 1.
    pub num_replicas: usize,
    /// This process's rank among them, from 0. Default 0.
    pub rank: usize,
    /// Whether each epoch has its own random order. Default true.
    pub shuffle: bool,
    /// Base seed of the order, to which the epoch is added. Default 0, whatever the run's seed, as in PyTorch.
    pub seed: u64,
    /// How the last samples are handled if the number of samples is not divisible by that of ranks. Default
    /// [`Tail::Pad`].
    pub tail: Tail,
}

impl Default for DistributedSamplerConfig {
    fn default() -> Self {
        Self { dataset_len: 0, num_replicas: 1, rank: 0, shuffle: true, seed: 0, tail: Tail::Pad }
    }
}

/// One rank's part of a data set: PyTorch's `DistributedSampler`, index for index.
///
/// An epoch has one order for all ranks, shuffled with `seed + epoch` or ascending, and rank r takes its positions r,
/// r + ranks, r + 2 ranks and so on. Call [`set_epoch`](Sampler::set_epoch) at the start of every epoch: without it
/// all epochs have the same order.
///
/// # Cost
///
/// Without shuffling, constant memory and no work in advance. With it, each rank computes the whole permutation at
/// the start of an epoch, as PyTorch does: four bytes for each sample of the data set (eight from 2^32 samples on).
///
/// ```
/// use sampler::{DistributedSampler, DistributedSamplerConfig, Sampler};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let config =
///     DistributedSamplerConfig { dataset_len: 10, num_replicas: 4, rank: 3, shuffle: false, ..Default::default() };
/// let mut sampler = DistributedSampler::new(config)?;
/// sampler.set_epoch(0);
/// assert_eq!(sampler.iter()?.collect::<Vec<_>>(), [3, 7, 1]); // 1 is padding
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedSampler {
    config: DistributedSamplerConfig,
    epoch: u64,
    /// Position in the epoch's order from which the ranks take turns: 0 unless resumed within an epoch.
    start: usize,
    /// Number of positions for this rank.
    count: usize,
}

impl DistributedSampler {
    /// Creates a sampler at the start of epoch 0.
    ///
    /// # Errors
    ///
    /// If `num_replicas` is 0 or the rank is out of range; if the length of the padded epoch overflows a `usize`.
    pub fn new(config: DistributedSamplerConfig) -> Result<Self, SamplerError> {
        let count = count_from(&config, 0)?;
        Ok(Self { config, epoch: 0, start: 0, count })
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &DistributedSamplerConfig {
        &self.config
    }

    /// The current epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// This rank's indices of the current epoch, or those remaining after [`resume`](Self::resume).
    ///
    /// # Errors
    ///
    /// If memory for shuffling is exhausted.
    pub fn iter(&self) -> Result<DistributedIndices, SamplerError> {
        let DistributedSamplerConfig { dataset_len, num_replicas, rank, shuffle, seed, .. } = self.config;
        let order = if shuffle && self.count > 0 {
            Some(Permutation::new(seed.wrapping_add(self.epoch), dataset_len)?)
        } else {
            None
        };
        let next = self.start.saturating_add(rank);
        Ok(DistributedIndices { order, dataset_len, next, step: num_replicas, left: self.count })
    }

    /// Returns the state to save when this rank has finished `taken` indices of the current iteration.
    ///
    /// Count the indices trained on, not those a loader has prefetched:
    /// [`Batches::samples`](crate::Batches::samples). All ranks are assumed to have finished equally many. Under
    /// [`Tail::Uneven`] save rank 0's state: a rank that has finished its whole share reports that the epoch is over,
    /// and rank 0 has the longest share.
    pub fn state(&self, taken: usize) -> SamplerState {
        let DistributedSamplerConfig { dataset_len, num_replicas, shuffle, seed, .. } = self.config;
        let consumed = if taken >= self.count {
            dataset_len
        } else {
            self.start.saturating_add(taken.saturating_mul(num_replicas)).min(dataset_len)
        };
        SamplerState { dataset_len, seed, shuffle, epoch: self.epoch, consumed }
    }

    /// Resumes from a saved state, possibly with another number of ranks than when it was saved.
    ///
    /// The rest of the epoch is divided again, each sample to one rank, except for the [`Tail`] at this number of
    /// ranks; padding repeats samples from the start of the epoch's order. With the same number of ranks the
    /// interrupted sequence continues exactly. A later [`set_epoch`](Sampler::set_epoch) with *another* epoch starts
    /// that one from its beginning; with the resumed epoch it has no effect, so that the training loop needs no
    /// special case.
    ///
    /// # Errors
    ///
    /// If the state has another data set length, seed or shuffling (the sampler is then unchanged); if the padded
    /// rest of the epoch overflows a `usize`.
    ///
    /// ```
    /// use sampler::{DistributedSampler, DistributedSamplerConfig, Sampler};
    ///
    /// # fn main() -> Result<(), sampler::SamplerError> {
    /// let config = DistributedSamplerConfig { dataset_len: 10, num_replicas: 2, shuffle: false, ..Default::default() };
    /// let saved = DistributedSampler::new(config.clone())?.state(2); // 2 ranks x 2 samples done
    ///
    /// let mut sampler = DistributedSampler::new(DistributedSamplerConfig { num_replicas: 3, ..config })?;
    /// sampler.resume(&saved)?;
    /// sampler.set_epoch(saved.epoch);
    /// assert_eq!(sampler.iter()?.collect::<Vec<_>>(), [4, 7]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        state.check(self.config.dataset_len, self.config.seed, self.config.shuffle)?;
        let start = state.consumed.min(state.dataset_len);
        self.count = count_from(&self.config, start)?;
        self.start = start;
        self.epoch = state.epoch;
        Ok(())
    }
}

impl Sampler for DistributedSampler {
    fn len(&self) -> usize {
        self.count
    }

    fn indices(&mut self) -> Result<Indices, SamplerError> {
        Ok(Box::new(self.iter()?))
    }

    fn set_epoch(&mut self, epoch: u64) {
        if epoch == self.epoch {
            return;
        }
        // It cannot fail, since `new` has computed the same.
        if let Ok(count) = count_from(&self.config, 0) {
            (self.epoch, self.start, self.count) = (epoch, 0, count);
        }
    }

    fn index_bound(&self) -> Option<usize> {
        Some(self.config.dataset_len)
    }
}

/// Number of positions from `start` on for the configured rank; checks that the last position does not overflow.
fn count_from(config: &DistributedSamplerConfig, start: usize) -> Result<usize, SamplerError> {
    let DistributedSamplerConfig { dataset_len, num_replicas, rank, tail, .. } = *config;
    let count = share_len(dataset_len - start, num_replicas, rank, tail)?;
    let end = if tail == Tail::Pad { count.checked_mul(num_replicas) } else { Some(0) };
    match end.and_then(|end| end.checked_add(start)) {
        Some(_) => Ok(count),
        None => Err(SamplerError::EpochTooLong { dataset_len, num_replicas }),
    }
}

/// One rank's indices of one epoch; skipping ahead (`nth`) takes constant time.
#[derive(Debug)]
pub struct DistributedIndices {
    order: Option<Permutation>,
    dataset_len: usize,
    next: usize,
    step: usize,
    left: usize,
}

impl Iterator for DistributedIndices {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.nth(0)
    }

    fn nth(&mut self, skipped: usize) -> Option<usize> {
        if skipped >= self.left {
            self.left = 0;
            return None;
        }
        // Remaining positions were checked not to overflow; the one after the last may saturate, unused.
        let position = self.next + skipped * self.step;
        self.next = position.saturating_add(self.step);
        self.left -= skipped + 1;
        // Padding wraps around the order, several times if there are more ranks than samples.
        let position = if position < self.dataset_len { position } else { position % self.dataset_len };
        Some(self.order.as_ref().map_or(position, |order| order.at(position)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for DistributedIndices {}
