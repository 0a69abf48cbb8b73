//! Bytes of tensors, to measure what a rank holds.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

/// Bytes of tensors.
pub fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    tensors.into_iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
}

/// Bytes of the gradients of these variables.
pub fn gradient_bytes(vars: &[Var], gradients: &GradStore) -> u64 {
    bytes(vars.iter().filter_map(|var| gradients.get(var)))
}
