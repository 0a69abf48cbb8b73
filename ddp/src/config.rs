//! Configuration: how gradients are grouped and averaged.

use training::AuditConfig;
use training::internal::known_buffers;

use crate::CommHook;

/// Configuration of how a [`crate::Ddp`] groups and averages gradients. It must be the same on every rank, which
/// [`crate::Ddp::new`] checks.
#[derive(Debug, Clone)]
pub struct DdpConfig {
    /// Bytes of gradients that are communicated together. Default: 25 MiB. Large buckets use the network better; small ones
    /// leave less to wait for after backward. A larger parameter has its own bucket; 0 gives every parameter its own.
    pub bucket_bytes: usize,
    /// Bytes of the first bucket of each dtype and device, at most `bucket_bytes`. Default: 1 MiB, so that communication starts early.
    pub first_bucket_bytes: usize,
    /// Tries `bucket_bytes` and several other sizes in the first steps, and keeps the one for which the slowest rank's step,
    /// from the start of backward to the last average, is shortest. Default: false. Four steps per size that results in
    /// different buckets, at most 8 sizes; these are ordinary training steps. Ranks stay bitwise equal, but the order of f32
    /// summation depends on the size, so runs may differ in the last digits.
    pub tune_bucket_bytes: bool,
    /// Last components of the names of tensors that are state and not parameters: the model gets the variable itself, no
    /// gradient is communicated, and all ranks start from rank 0's values. Default: `running_mean` and `running_var`, as
    /// `candle_nn::BatchNorm` names them, and [`ops::EXPERT_CORRECTION`].
    pub buffers: Vec<String>,
    /// Broadcasts rank 0's buffers after each [`crate::Ddp::backward`], so that running statistics are equal on all ranks,
    /// and any rank may evaluate or save. Default: true. PyTorch does it before the next forward pass, to the same effect;
    /// here no forward pass communicates. If rank 0 has joined, the buffers of the first rank that has data are used.
    pub broadcast_buffers: bool,
    /// How buckets are averaged. Default: uncompressed.
    pub hook: CommHook,
    /// What to do about parameters without a gradient on any rank after the first [`crate::Ddp::backward`] with data.
    /// Default: rank 0 of the group warns once. If it is an error instead, the `Ddp` is unusable afterwards, as after any
    /// error of backward.
    pub audit: AuditConfig,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            tune_bucket_bytes: false,
            buffers: known_buffers(),
            broadcast_buffers: true,
            hook: CommHook::AllReduce,
            audit: AuditConfig::default(),
        }
    }
}

impl DdpConfig {
    /// Returns the bytes of the first bucket.
    pub(crate) fn first_bytes(&self) -> usize {
        self.first_bucket_bytes.min(self.bucket_bytes)
    }
}
