//! The model of the from-scratch tutorial: one linear layer, y = w x + b.

use candle_core::{Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder};

/// `nn.Linear(1, 1)` under the name `linear`.
#[derive(Debug)]
pub struct SimpleModel {
    linear: Linear,
}

impl SimpleModel {
    /// Creates the layer.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(builder: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { linear: candle_nn::linear(1, 1, builder.pp("linear"))? })
    }
}

impl Module for SimpleModel {
    /// # Shapes
    /// (batch, 1) to (batch, 1).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.linear.forward(x)
    }
}
