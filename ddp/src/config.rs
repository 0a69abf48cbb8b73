//! How gradients are grouped and averaged.

use training::AuditConfig;

use crate::CommHook;

/// How a [`crate::Ddp`] groups and averages gradients. The same on every rank, which [`crate::Ddp::new`] checks.
#[derive(Debug, Clone)]
pub struct DdpConfig {
    /// Bytes of gradients that travel together. Default: 25 MiB. Large buckets use the network better, small ones leave
    /// less to wait for after backward. A parameter that is larger has a bucket of its own; 0 gives every parameter its own.
    pub bucket_bytes: usize,
    /// Bytes of the first bucket of each dtype and device. Default: 1 MiB, so that communication begins early.
    pub first_bucket_bytes: usize,
    /// Tries `bucket_bytes` and several other sizes in the first steps, and stays with that for which the slowest rank's
    /// step, from the start of backward to the last average, is shortest. Default: false. Four steps for each size that
    /// comes to other buckets, at most 8 sizes; these steps count as any others. Ranks stay equal to the bit; but sums of
    /// f32 are rounded in another order with another size, so that one run may differ from the next in last places.
    pub measure_bucket_bytes: bool,
    /// Last parts of the names that are state and not parameters: the model gets the variable itself, no gradient is
    /// communicated, and rank 0's values are the ones all ranks start from. Default: `running_mean` and `running_var`,
    /// as `candle_nn::BatchNorm` calls them.
    pub buffers: Vec<String>,
    /// Gives all ranks rank 0's buffers after each [`crate::Ddp::backward`], so that running statistics are equal on all
    /// ranks, and any of them may evaluate or save. Default: true. PyTorch does it before the next forward pass, to the
    /// same effect; here no forward pass communicates. Where rank 0 has joined, the first rank counts that has data.
    pub broadcast_buffers: bool,
    /// How buckets are averaged. Default: as they are.
    pub hook: CommHook,
    /// What is done about parameters that have no gradient on any rank after the first [`crate::Ddp::backward`] with data. Default: rank
    /// 0 of the group warns once. An error instead leaves the `Ddp` of no use, as any error of backward does.
    pub audit: AuditConfig,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            measure_bucket_bytes: false,
            buffers: vec!["running_mean".into(), "running_var".into()],
            broadcast_buffers: true,
            hook: CommHook::AllReduce,
            audit: AuditConfig::default(),
        }
    }
}

impl DdpConfig {
    pub(crate) fn is_buffer(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        self.buffers.iter().any(|buffer| buffer == last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_go_by_the_last_part_of_a_name() {
        let config = DdpConfig::default();
        assert!(config.is_buffer("layers.0.running_mean") && config.is_buffer("running_var"));
        assert!(!config.is_buffer("running_mean.weight") && !config.is_buffer("my_running_mean"));
    }
}
