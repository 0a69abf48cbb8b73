//! Batches of a rank's part of a data set, epoch after epoch.

use comm::Mesh;
use sampler::{DistributedSampler, DistributedSamplerConfig, Sampler};

use crate::error::Result;

/// Goes through the samples of one data-parallel rank.
pub(super) struct Batches {
    sampler: DistributedSampler,
    batch_size: usize,
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
        Ok(Self { sampler, batch_size })
    }

    /// Batches of an epoch.
    pub(super) fn len(&self) -> usize {
        self.sampler.len().div_ceil(self.batch_size)
    }

    /// The places of the samples of each batch.
    pub(super) fn epoch(&mut self, epoch: usize) -> Result<Vec<Vec<usize>>> {
        self.sampler.set_epoch(epoch as u64);
        let all: Vec<usize> = self.sampler.iter()?.collect();
        Ok(all.chunks(self.batch_size).map(<[usize]>::to_vec).collect())
    }
}
