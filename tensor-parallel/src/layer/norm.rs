//! Layer norm between the divided layers.

use candle_nn::Init;
use ops::LayerNorm;

use crate::{Result, ShardBuilder};

/// PyTorch's default.
const EPS: f64 = 1e-5;

/// Builds an `nn.LayerNorm(size)`, which every rank holds whole and applies to its part of the sequence.
///
/// # Errors
/// Errors of the builder.
pub fn norm(size: usize, builder: &ShardBuilder) -> Result<LayerNorm> {
    let weight = builder.get_between(size, "weight", Init::Const(1.0))?;
    let bias = builder.get_between(size, "bias", Init::Const(0.0))?;
    Ok(LayerNorm::new(weight, bias, EPS))
}
