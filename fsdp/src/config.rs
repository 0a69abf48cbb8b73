//! What is sharded, and in which dtypes.

use candle_core::DType;
use training::AuditConfig;

/// What each rank keeps of the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Strategy {
    /// A part of the parameters, gradients and optimizer state: a unit's parameters are gathered before it runs, forward
    /// and backward, and released after. The default.
    #[default]
    FullShard,
    /// A part of the gradients and optimizer state, and between steps of the parameters: once gathered in the forward pass
    /// they stay until the unit's backward is over. One gather less.
    ShardGradOp,
    /// All of it, as data parallelism does; gradients are averaged by all-reduce. Not for [`crate::Fsdp::hybrid`].
    NoShard,
}

/// The dtypes of a step. Shards, gradients of shards and optimizer state keep the dtype of the `VarBuilder`, f32 usually.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MixedPrecision {
    /// What parameters are gathered in, and units compute in. Default: none, the shards' own.
    pub param_dtype: Option<DType>,
    /// What gradients are averaged in. f16 and bf16 are summed in f32 and rounded once. Default: none, that of the
    /// parameters.
    pub reduce_dtype: Option<DType>,
    /// What [`crate::Fsdp`]'s forward gives. Default: none, what the model gives.
    pub output_dtype: Option<DType>,
}

/// How a [`crate::Fsdp`] shards. The same on every rank, which [`crate::Fsdp::new`] checks.
#[derive(Debug, Clone)]
pub struct FsdpConfig {
    /// What is sharded. Default: everything.
    pub strategy: Strategy,
    /// The dtypes of a step. Default: those of the shards.
    pub mixed_precision: MixedPrecision,
    /// A parameter of fewer elements travels together with the other small ones of its unit, which costs a copy; larger ones
    /// travel where they lie. Default: 16384.
    pub pack_elements: usize,
    /// Last parts of the names that are state and not parameters: every rank has them whole, and they have no gradient. Checkpoints and whole files keep rank 0's. Default: `running_mean` and
    /// `running_var`, as `candle_nn::BatchNorm` calls them.
    pub buffers: Vec<String>,
    /// What buffers of floats are kept in; a layer may want them in what it computes in. Files may have them in any other.
    /// Default: none, the dtype of the `VarBuilder`.
    pub buffer_dtype: Option<DType>,
    /// What is done about parameters that have no gradient on any rank after the first [`crate::Fsdp::backward`]. Default: the first
    /// rank warns once. An error instead leaves the `Fsdp` of no use, as any error of backward does.
    pub audit: AuditConfig,
}

impl Default for FsdpConfig {
    fn default() -> Self {
        Self {
            strategy: Strategy::default(),
            mixed_precision: MixedPrecision::default(),
            pack_elements: 16 * 1024,
            buffers: vec!["running_mean".into(), "running_var".into()],
            buffer_dtype: None,
            audit: AuditConfig::default(),
        }
    }
}

/// How one unit differs from the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnitConfig {
    /// Whether its parameters stay from forward to backward. Default: as the [`Strategy`] says. Worth it for a unit that is
    /// small or runs last.
    pub keep_after_forward: Option<bool>,
}

impl FsdpConfig {
    pub(crate) fn is_buffer(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        self.buffers.iter().any(|buffer| buffer == last)
    }
}
