//! The model of the PyTorch handbook's data-parallel example: two layers with a ReLU between them.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use training::{Linear, linear};

/// Features of a sample.
pub const FEATURES: usize = 10;
/// Number of classes.
pub const CLASSES: usize = 2;
const HIDDEN: usize = 20;

/// `nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))`, whose layers PyTorch names `0` and `2`.
#[derive(Debug)]
pub struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    /// Creates the layers.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(builder: VarBuilder<'_>) -> Result<Self> {
        let first = linear(FEATURES, HIDDEN, builder.pp("0"))?;
        Ok(Self { first, second: linear(HIDDEN, CLASSES, builder.pp("2"))? })
    }
}

impl Module for Mlp {
    /// # Shapes
    /// (batch, 10) to logits (batch, 2).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.second.forward(&self.first.forward(x)?.relu()?)
    }
}
