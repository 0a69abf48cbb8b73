//! Sizes of tensors in bytes, to measure the memory that a rank uses for model state.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use report::metrics::MemoryUse;
use training::OptimizerState;

use crate::error::Result;

/// Returns the total size of tensors, in bytes.
pub fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    tensors.into_iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
}

/// Returns the total size, in bytes, of the gradients of these variables.
pub(crate) fn gradient_bytes(vars: &[Var], gradients: &GradStore) -> u64 {
    bytes(vars.iter().filter_map(|var| gradients.get(var)))
}

/// Returns the memory of a rank's variables and of its optimizer's state, beside the bytes of gradients and of
/// activations that were measured in its first step.
pub(crate) fn memory_use(
    vars: &[Var],
    optimizer: &impl OptimizerState,
    first: Option<(u64, u64)>,
) -> Result<MemoryUse> {
    let (gradients, activations) = first.unwrap_or_default();
    Ok(MemoryUse {
        weights: bytes(vars.iter().map(|var| var.as_tensor())),
        gradients,
        optimizer: bytes(optimizer.state()?.iter().map(|(_, tensor)| tensor)),
        activations,
        ..MemoryUse::default()
    })
}
