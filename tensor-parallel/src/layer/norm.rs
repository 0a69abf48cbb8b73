//! Norms between the divided layers.

use candle_nn::Init;
use training::LayerNorm;

use crate::{Result, ShardBuilder};

/// PyTorch's.
const EPS: f64 = 1e-5;

/// `nn.LayerNorm(size)`, which every rank has whole and applies to what it has of the sequence.
///
/// # Errors
/// Those of the builder.
pub fn norm(size: usize, builder: &ShardBuilder) -> Result<LayerNorm> {
    let weight = builder.get_between(size, "weight", Init::Const(1.0))?;
    let bias = builder.get_between(size, "bias", Init::Const(0.0))?;
    Ok(LayerNorm::new(weight, bias, EPS))
}
