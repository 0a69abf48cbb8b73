//! Communication hooks: how a bucket of gradients is averaged over ranks.

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

/// How gradients are averaged: exactly, or compressed. See [`crate::DdpConfig::hook`].
///
/// With every hook the average is bitwise equal on all ranks, weights and [`crate::Ddp::join`] work as without a hook, and
/// clipping by global norm uses the averaged gradients that the optimizer gets. With a single rank nothing is sent, and
/// nothing is compressed.
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
    /// An all-reduce of each uncompressed bucket. The default.
    #[default]
    AllReduce,
    /// Sends gradients of f32 and f64 as f16: half the bytes of f32, 11 bits of precision, two collectives per bucket. They
    /// are averaged in f32. Values above 65,504 become infinite.
    F16,
    /// The same with bf16: 8 bits of precision, the range of f32.
    Bf16,
    /// Sends gradients of matrices as low-rank factors; the approximation error is added to the next step's gradient.
    PowerSgd(PowerSgdConfig),
    /// A user-defined hook.
    Custom(Arc<dyn BucketHook>),
}

impl CommHook {
    /// Creates the hook, with its own state.
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

/// A user-defined communication hook.
///
/// Its `Debug` output must be the same on every rank, which [`crate::Ddp::new`] checks, so it should show the configuration.
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
    /// Starts to average a bucket. Called for each bucket of a step, in the same order on every rank, during backward or at
    /// its end.
    ///
    /// # Errors
    /// Any error ends training on this rank.
    fn begin(&self, bucket: GradBucket) -> Result<Box<dyn Reduction>>;
}

/// The averaging of one bucket, as a sequence of collectives. Every rank must run the same sequence.
pub trait Reduction: Send {
    /// Returns the next collective; called when the previous one has finished. `None` when [`GradBucket::flat`] contains the
    /// mean over ranks.
    ///
    /// # Errors
    /// Any error ends training on this rank.
    fn next(&mut self) -> Result<Option<Operation>>;

    /// Returns true if another collective follows the one in progress. That collective is then started together with the next
    /// bucket, during backward, rather than after backward. Must be the same on every rank.
    fn has_more(&self) -> bool {
        false
    }
}

/// Gradients that are communicated together.
#[derive(Debug, Clone)]
pub struct GradBucket {
    /// All of them, one after the other, followed by a flag for each: 1 if this rank has used the parameter, else 0. The
    /// result, the mean over ranks, is written here, including that of the flags: above 0 if any rank has a 1.
    pub flat: Tensor,
    /// Position of each gradient.
    pub slots: Vec<GradSlot>,
}

/// One gradient in a [`GradBucket`].
#[derive(Debug, Clone)]
pub struct GradSlot {
    /// Index of its parameter in [`crate::Ddp::parameters`].
    pub parameter: usize,
    /// Its shape.
    pub shape: Shape,
    /// Offset in the flat tensor, in elements.
    pub offset: usize,
}
