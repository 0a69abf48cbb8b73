//! Products with a weight that this rank has a part of.

use std::sync::Arc;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use ops::quantized::{Format, QuantizedLinear};
use training::build::{Division, Layers, LinearConfig};

/// A weight, or this rank's part of it. Where the model is sharded, its tensors are gathered only while their unit runs.
pub(super) enum Matrix {
    /// (outputs, inputs).
    Wide(Tensor),
    /// In few bits; of each row, the number of its first scale in the whole weight.
    Quantized { format: Format, blocks: Tensor, scales: Tensor, rows: Arc<[usize]> },
}

impl Matrix {
    /// Returns how its numbers are held; `None` if they are not quantized.
    pub(super) fn format(&self) -> Option<Format> {
        match self {
            Self::Wide(_) => None,
            Self::Quantized { format, .. } => Some(*format),
        }
    }

    /// Computes `x w'` with this rank's part alone.
    fn times(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Wide(weight) => ops::Linear::new(weight.clone(), None).forward(x),
            Self::Quantized { format, blocks, scales, rows } => {
                QuantizedLinear::new(*format, blocks.clone(), scales, rows.clone())?.forward(x)
            }
        }
    }

    /// Computes `x w'` in the dtype of `x`, without a graph.
    pub(super) fn constant_times(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Wide(weight) => x.detach().matmul(&weight.detach().to_dtype(x.dtype())?.t()?),
            Self::Quantized { .. } => self.times(&x.detach()),
        }
    }

    /// Returns the sum of the squares of each row.
    pub(super) fn squares(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Wide(weight) => weight.detach().to_dtype(dtype)?.sqr()?.sum(1),
            Self::Quantized { format, blocks, scales, rows } => {
                let layer = QuantizedLinear::new(*format, blocks.clone(), scales, rows.clone())?;
                layer.squares()?.to_dtype(dtype)
            }
        }
    }
}

/// A linear layer without a bias, divided as configured.
pub(super) struct Product {
    pub(super) matrix: Matrix,
    pub(super) division: Division,
    pub(super) layers: Arc<dyn Layers>,
}

impl Module for Product {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.division {
            Division::Whole => self.matrix.times(x),
            Division::Outputs => self.matrix.times(&self.layers.divide(x)?),
            Division::Inputs => self.layers.combine(&self.matrix.times(x)?),
        }
    }
}

/// Makes the part of a frozen weight that this rank has.
pub(super) fn frozen_weight(
    layers: &Arc<dyn Layers>,
    vb: &VarBuilder<'static>,
    config: &LinearConfig,
) -> Result<Product> {
    let matrix = Matrix::Wide(layers.weight(vb, config)?);
    Ok(Product { matrix, division: config.division, layers: layers.clone() })
}
