//! Sizes of tensors in bytes, to measure the memory that a rank uses for model state.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

/// Returns the total size of tensors, in bytes.
pub fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    tensors.into_iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
}

/// Returns the total size, in bytes, of the gradients of these variables.
pub fn gradient_bytes(vars: &[Var], gradients: &GradStore) -> u64 {
    bytes(vars.iter().filter_map(|var| gradients.get(var)))
}
