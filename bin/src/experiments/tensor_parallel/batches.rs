//! Batches of a rank's part of a data set, epoch after epoch.

use comm::Mesh;
use sampler::{DistributedSampler, DistributedSamplerConfig, Sampler, SamplerState};

use crate::error::Result;

/// Goes through the samples of one data-parallel rank.
pub(super) struct Batches {
    sampler: DistributedSampler,
    batch_size: usize,
    /// Samples of this epoch that have been given out, since it began or was resumed.
    taken: usize,
}

impl Batches {
    /// The part that the rank's place along `dp` has, in the order of PyTorch's sampler of the same name.
    pub(super) fn new(mesh: &Mesh, samples: usize, batch_size: usize) -> Result<Self> {
        let dp = mesh.axis("dp")?;
        let sampler = DistributedSampler::new(DistributedSamplerConfig {
            dataset_len: samples,
            num_replicas: dp.world_size(),
            rank: dp.rank(),
            ..DistributedSamplerConfig::default()
        })?;
        Ok(Self { sampler, batch_size, taken: 0 })
    }

    /// Batches of this epoch, or those that were left of it where it was resumed.
    pub(super) fn len(&self) -> usize {
        self.sampler.len().div_ceil(self.batch_size)
    }

    /// The places of the samples of each batch.
    pub(super) fn epoch(&mut self, epoch: usize) -> Result<Vec<Vec<usize>>> {
        self.begin(epoch);
        let all: Vec<usize> = self.sampler.iter()?.collect();
        Ok(all.chunks(self.batch_size).map(<[usize]>::to_vec).collect())
    }

    /// An epoch comes next.
    pub(super) fn begin(&mut self, epoch: usize) {
        self.taken = 0;
        self.sampler.set_epoch(epoch as u64);
    }

    /// A batch of so many samples has been learnt from.
    pub(super) fn learnt(&mut self, samples: usize) {
        self.taken += samples;
    }

    /// Where the run stands among the samples.
    pub(super) fn state(&self) -> SamplerState {
        self.sampler.state(self.taken)
    }

    /// Goes on from there.
    pub(super) fn resume(&mut self, state: &SamplerState) -> Result<()> {
        self.taken = 0;
        Ok(self.sampler.resume(state)?)
    }
}
