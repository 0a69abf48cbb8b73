//! Communication hooks: how a bucket of gradients becomes its mean over ranks.

mod all_reduce;
mod half;
mod orthogonal;
mod power_sgd;

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{DType, Shape, Tensor};
use comm::Operation;

use crate::Result;
use all_reduce::AllReduce;
use half::Half;
use power_sgd::PowerSgd;
pub use power_sgd::PowerSgdConfig;

/// How gradients are averaged: exactly, or with fewer bytes. See [`crate::DdpConfig::hook`].
///
/// With every hook the average is equal to the bit on all ranks, weights and [`crate::Ddp::join`] count as without, and
/// clipping by global norm sees what the optimizer gets. On a single rank nothing travels, and nothing is compressed.
///
/// ```
/// use ddp::{CommHook, DdpConfig, PowerSgdConfig};
///
/// let half = DdpConfig { hook: CommHook::Bf16, ..DdpConfig::default() };
/// let low_rank = CommHook::PowerSgd(PowerSgdConfig { rank: 2, ..PowerSgdConfig::default() });
/// # let _ = (half, low_rank);
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum CommHook {
    /// An all-reduce of each bucket as it is. The default.
    #[default]
    AllReduce,
    /// Gradients of f32 and f64 travel as f16: half the bytes of f32, 11 bits of precision, in two collectives for each
    /// bucket. They are averaged in f32. What is larger than 65,504 becomes infinite.
    F16,
    /// The same as bf16: 8 bits of precision, the range of f32.
    Bf16,
    /// Gradients of matrices travel as factors of low rank, and what that leaves out goes into the next step.
    PowerSgd(PowerSgdConfig),
    /// One's own.
    Custom(Arc<dyn BucketHook>),
}

impl CommHook {
    /// What does it, with a memory of its own.
    pub(crate) fn start(&self, world_size: usize) -> Arc<dyn BucketHook> {
        match self {
            CommHook::AllReduce => Arc::new(AllReduce),
            CommHook::F16 => Arc::new(Half { dtype: DType::F16, world_size }),
            CommHook::Bf16 => Arc::new(Half { dtype: DType::BF16, world_size }),
            CommHook::PowerSgd(config) => Arc::new(PowerSgd::new(config.clone())),
            CommHook::Custom(hook) => hook.clone(),
        }
    }
}

/// A communication hook of one's own.
///
/// Its `Debug` text must be the same on every rank, which [`crate::Ddp::new`] checks: so it should show the configuration.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::Tensor;
/// use comm::{Operation, ReduceOp};
/// use ddp::{BucketHook, CommHook, DdpConfig, GradBucket, Reduction, Result};
///
/// /// The mean, by a sum.
/// #[derive(Debug)]
/// struct SumThenDivide {
///     world_size: f64,
/// }
///
/// impl BucketHook for SumThenDivide {
///     fn begin(&self, bucket: GradBucket) -> Result<Box<dyn Reduction>> {
///         Ok(Box::new(Sum { flat: bucket.flat, world_size: self.world_size, is_sent: false }))
///     }
/// }
///
/// struct Sum {
///     flat: Tensor,
///     world_size: f64,
///     is_sent: bool,
/// }
///
/// impl Reduction for Sum {
///     fn next(&mut self) -> Result<Option<Operation>> {
///         if !std::mem::replace(&mut self.is_sent, true) {
///             return Ok(Some(Operation::AllReduce { tensor: self.flat.clone(), op: ReduceOp::Sum }));
///         }
///         self.flat.slice_set(&(&self.flat / self.world_size)?, 0, 0)?;
///         Ok(None)
///     }
/// }
///
/// let hook = CommHook::Custom(Arc::new(SumThenDivide { world_size: 2.0 }));
/// let config = DdpConfig { hook, ..DdpConfig::default() };
/// # let _ = config;
/// ```
pub trait BucketHook: Debug + Send + Sync {
    /// Begins to average a bucket. Called for each bucket of a step, in the same order on every rank, during backward or
    /// at its end.
    ///
    /// # Errors
    /// Whatever ends training on this rank.
    fn begin(&self, bucket: GradBucket) -> Result<Box<dyn Reduction>>;
}

/// A bucket on its way, as a sequence of collectives: equally many, and the same ones, on every rank.
pub trait Reduction: Send {
    /// The next collective; called when the one before is done. None when [`GradBucket::flat`] holds the mean over ranks.
    ///
    /// # Errors
    /// Whatever ends training on this rank.
    fn next(&mut self) -> Result<Option<Operation>>;

    /// True where another collective follows the one that is under way. Then it begins with the next bucket, while
    /// backward goes on, and not after backward. The same on every rank.
    fn has_more(&self) -> bool {
        false
    }
}

/// Gradients that travel together.
#[derive(Debug, Clone)]
pub struct GradBucket {
    /// All of them, one after the other; then, for each, a 1 if this rank has used the parameter, else a 0. The mean goes
    /// here, that of the last elements too: above 0 where any rank has a 1.
    pub flat: Tensor,
    /// Where each of them lies.
    pub slots: Vec<GradSlot>,
}

/// One gradient in a [`GradBucket`].
#[derive(Debug, Clone)]
pub struct GradSlot {
    /// Its parameter's place in [`crate::Ddp::parameters`].
    pub parameter: usize,
    /// Its shape.
    pub shape: Shape,
    /// Elements before it.
    pub offset: usize,
}
