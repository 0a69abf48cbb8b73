//! Fused operations: one pass over memory on a CPU or a CUDA device, with hand-written gradients.
//!
//! Each file has an operation's row functions (plain loops over slices), its `CustomOp` for f32 and f64 on a CPU, what calls
//! the kernels of [`cuda`](crate::cuda) and their backward, and a version composed of candle's operations for other devices.
//! f16 and bf16 are computed in f32 on all devices; matrix products take them as they are, with sums in f32.

mod activation;
mod attention;
mod binary_cross_entropy;
mod cast;
mod columns;
mod conv2d;
mod cross_entropy;
mod embedding;
mod experts;
mod gated;
mod gated_mlp;
mod gelu;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod linear_log_probs;
mod max_pool2d;
mod mse;
mod relu;
mod rms_norm;
mod rotary;
mod scale_rows;
mod self_attention;
mod sigmoid;
mod softmax;

use candle_core::Tensor;

pub use attention::{AttentionConfig, AttentionMask, attention, attention_with_key_mask};
pub use binary_cross_entropy::binary_cross_entropy;
pub use cast::cast;
pub use columns::columns;
pub use conv2d::conv2d;
pub use cross_entropy::cross_entropy;
pub use embedding::embedding;
pub use experts::{
    DividedExperts, EXPERT_CORRECTION, Expert, ExpertAdapter, ExpertExchange, ExpertWeight, Experts,
    RouteRecord, Router, Routes, RowsOnTheWay, Scoring, correction_moves, experts,
};
pub use gated::{Gate, geglu, geglu_tanh, swiglu};
pub use gated_mlp::{GatedMlp, gated_mlp};
pub use gelu::gelu;
pub use layer_norm::{LayerNorm, layer_norm};
pub use linear::{Linear, linear, linear_no_bias};
pub use linear_cross_entropy::{LinearCrossEntropyConfig, linear_cross_entropy};
pub use linear_log_probs::linear_log_probs;
pub use max_pool2d::max_pool2d;
pub use mse::mse;
pub use relu::relu;
pub use rms_norm::{RmsNorm, rms_norm};
pub use rotary::{Rotary, RotaryConfig, RotaryLayout, RotaryScaling};
pub use scale_rows::scale_rows;
pub use self_attention::{SelfAttention, multihead_attention, self_attention};
pub use sigmoid::sigmoid;
pub use softmax::{log_softmax, softmax};

use crate::dtype::working_dtype;
use crate::{Error, Result};

/// Checks that a norm's parameter has one element for each column of `x`, and the same dtype.
fn check_parameter(
    operation: &'static str,
    tensor: &'static str,
    parameter: &Tensor,
    x: &Tensor,
) -> Result<()> {
    if x.dims().last().is_none_or(|size| parameter.dims() != [*size]) {
        let expected = x.dims().last().map(|&size| vec![size]).unwrap_or_default();
        return Err(Error::ShapeMismatch { operation, tensor, expected, got: parameter.dims().to_vec() });
    }
    if parameter.dtype() != x.dtype() {
        let (expected, got) = (x.dtype(), parameter.dtype());
        return Err(Error::DTypeMismatch { operation, tensor, expected, got });
    }
    Ok(())
}

/// Elements per row of a shape, at least 1 (for `chunks`).
fn width(dims: &[usize]) -> usize {
    dims.last().copied().unwrap_or(1).max(1)
}

/// Asserts that two computations agree: in their results, and in the gradients of `loss` of them.
#[cfg(test)]
fn assert_agree(
    [one, other]: [Tensor; 2],
    loss: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    vars: &[&candle_core::Var],
    most: f64,
    what: &str,
) -> candle_core::Result<()> {
    let found = |y: &Tensor| {
        let grads = loss(y)?.backward()?;
        let of = |var: &&candle_core::Var| grads.get(var).cloned();
        let gradients: Option<Vec<Tensor>> = vars.iter().map(of).collect();
        Ok::<_, candle_core::Error>((y.detach(), gradients.unwrap_or_else(|| panic!("{what}: no gradient"))))
    };
    let ((value, gradients), (other_value, others)) = (found(&one)?, found(&other)?);
    let pairs = gradients.iter().zip(&others).chain([(&value, &other_value)]);
    for (a, b) in pairs {
        assert_eq!(a.dims(), b.dims(), "{what}");
        let gap = (a - b)?.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(gap <= most, "{what}: {gap}");
    }
    Ok(())
}
