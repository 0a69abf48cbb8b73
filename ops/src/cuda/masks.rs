//! Masks of attention and of dropout, as the kernels take them.

use candle_core::Tensor;

/// What a query of attention sees, and the factor of its scores.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the kernels read all of it"))]
pub(crate) struct Seen {
    pub(crate) heads: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    /// 0: all keys, 1: those up to the query's own position, 2: the last `window` of these, 3: those after it.
    pub(crate) kind: u32,
    pub(crate) window: usize,
    pub(crate) scale: f64,
}

/// The dropout mask of a tensor.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the kernel reads all of it"))]
pub(crate) struct DeviceMask {
    /// Of i64, one key for `lines` lines each.
    pub(crate) keys: Tensor,
    pub(crate) lines: usize,
    pub(crate) width: usize,
    /// Lines before the tensor's first, elements of a line before the tensor's first, and width of a whole line.
    pub(crate) before: usize,
    pub(crate) first: usize,
    pub(crate) whole: usize,
    pub(crate) threshold: u64,
    pub(crate) scale: f64,
}
