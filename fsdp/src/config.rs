//! Configuration: sharding strategy, dtypes, buffers.

use candle_core::DType;
use training::AuditConfig;
use training::internal::known_buffers;

/// What each rank keeps of the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ShardingStrategy {
    /// A shard of the parameters, gradients and optimizer state: a unit's parameters are gathered before it runs, in forward
    /// and in backward, and released afterwards. The default.
    #[default]
    FullShard,
    /// A shard of the gradients and optimizer state and, between steps, of the parameters: parameters gathered in forward are
    /// kept until the unit's backward has finished. This saves one gather.
    ShardGradOp,
    /// Everything, as in data parallelism; gradients are averaged by all-reduce. Not for [`crate::Fsdp::hybrid`].
    NoShard,
}

/// The dtypes of a step. Shards, their gradients and optimizer state keep the dtype of the `VarBuilder`, usually f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MixedPrecision {
    /// Dtype in which parameters are gathered and units compute. Default: `None`, that of the shards.
    pub param_dtype: Option<DType>,
    /// Dtype in which gradients are averaged. f16 and bf16 are summed in f32 and rounded once. Default: `None`, that in which
    /// the unit computes.
    pub reduce_dtype: Option<DType>,
    /// Dtype of the output of [`crate::Fsdp`]'s forward. Default: `None`, that of the model's output.
    pub output_dtype: Option<DType>,
}

/// Configuration of a [`crate::Fsdp`]. It must be the same on every rank, which [`crate::Fsdp::new`] checks.
#[derive(Debug, Clone)]
pub struct FsdpConfig {
    /// What is sharded. Default: [`ShardingStrategy::FullShard`].
    pub strategy: ShardingStrategy,
    /// The dtypes of a step. Default: those of the shards.
    pub mixed_precision: MixedPrecision,
    /// Parameters of fewer elements than this are communicated together with the other small ones of their unit, at the cost
    /// of a copy; larger ones are communicated in place. Default: 16384.
    pub pack_elements: usize,
    /// Last components of the names of tensors that are state and not parameters: every rank has them whole, and they have no
    /// gradient. Checkpoints and whole-model files contain those of rank 0. Default: `running_mean` and `running_var`, as
    /// `candle_nn::BatchNorm` names them, and [`ops::EXPERT_CORRECTION`].
    pub buffers: Vec<String>,
    /// Dtype in which floating-point buffers are kept, for layers that need them in the dtype they compute in. Files may
    /// contain them in any floating-point dtype. Default: `None`, the dtype of the `VarBuilder`.
    pub buffer_dtype: Option<DType>,
    /// What to do about parameters without a gradient on any rank after the first [`crate::Fsdp::backward`]. Default: rank 0
    /// warns once. If it is an error instead, the `Fsdp` is unusable afterwards, as after any error of backward.
    pub audit: AuditConfig,
}

impl Default for FsdpConfig {
    fn default() -> Self {
        Self {
            strategy: ShardingStrategy::default(),
            mixed_precision: MixedPrecision::default(),
            pack_elements: 16 * 1024,
            buffers: known_buffers(),
            buffer_dtype: None,
            audit: AuditConfig::default(),
        }
    }
}

/// Settings of one unit that differ from the model's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnitConfig {
    /// Whether its parameters are kept from forward to backward. Default: as the [`ShardingStrategy`] says. Worthwhile for a unit
    /// that is small or runs last.
    pub keep_after_forward: Option<bool>,
}
