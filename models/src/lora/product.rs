//! Products with a weight that this rank has a part of.

use std::sync::Arc;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::VarBuilder;
use ops::quantized::{Format, QuantizedPart};
use training::build::{Division, Layers, LinearConfig};

/// A weight, or this rank's part of it. Where the model is sharded, its tensors are gathered only while their unit runs.
pub(super) enum Matrix {
    /// (outputs, inputs).
    Wide(Tensor),
    /// In few bits.
    Quantized(QuantizedPart),
}

impl Matrix {
    /// Returns how its numbers are held; `None` if they are not quantized.
    pub(super) fn format(&self) -> Option<Format> {
        match self {
            Self::Wide(_) => None,
            Self::Quantized(part) => Some(part.format),
        }
    }

    /// Computes `x w'` with this rank's part alone.
    fn times(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Wide(weight) => ops::Linear::new(weight.clone(), None).forward(x),
            Self::Quantized(part) => part.layer()?.forward(x),
        }
    }

    /// Computes `x w'` in the dtype of `x`, without a graph. Of a weight in another dtype some rows are converted at a time.
    pub(super) fn constant_times(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Wide(weight) if weight.dtype() == x.dtype() => x.detach().matmul(&weight.detach().t()?),
            Self::Wide(weight) => {
                let x = x.detach();
                by_rows(weight, 1, |rows| x.matmul(&rows.to_dtype(x.dtype())?.t()?))
            }
            Self::Quantized(_) => self.times(&x.detach()),
        }
    }

    /// Returns the sum of the squares of each row, without a copy of the weight: some rows are squared at a time.
    pub(super) fn squares(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Wide(weight) => by_rows(weight, 0, |rows| rows.to_dtype(dtype)?.sqr()?.sum(1)),
            Self::Quantized(part) => part.layer()?.squares()?.to_dtype(dtype),
        }
    }
}

/// Computes some rows of a weight at a time, and joins the results along `dim`.
fn by_rows(weight: &Tensor, dim: usize, of: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    /// Numbers at a time on a CPU, about what a cache holds.
    const OF_CPU: usize = 1 << 18;
    /// On other devices, which are slow to begin.
    const OF_OTHERS: usize = 1 << 22;
    let (weight, (outputs, inputs)) = (weight.detach(), weight.dims2()?);
    let numbers = if weight.device().is_cpu() { OF_CPU } else { OF_OTHERS };
    let each = (numbers / inputs.max(1)).max(1);
    if outputs <= each {
        return of(&weight);
    }
    // Parts of about the same size, since few rows are multiplied in another way.
    let each = outputs.div_ceil(outputs.div_ceil(each)).next_multiple_of(16);
    let starts = (0..outputs).step_by(each);
    let parts = starts.map(|start| of(&weight.narrow(0, start, each.min(outputs - start))?));
    Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, dim)
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

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn what_is_computed_by_rows_is_that_of_the_whole_weight() -> Result<()> {
        for (outputs, inputs) in [(1000, 640), (409, 641), (3, 5)] {
            let weight = Tensor::randn(0f32, 1.0, (outputs, inputs), &Device::Cpu)?;
            let x = Tensor::randn(0f32, 1.0, (8, inputs), &Device::Cpu)?;
            for dtype in [DType::F32, DType::BF16] {
                let weight = weight.to_dtype(dtype)?;
                let wide = weight.to_dtype(DType::F32)?;
                let matrix = Matrix::Wide(weight);
                let squares = matrix.squares(DType::F32)?.to_vec1::<f32>()?;
                assert_eq!(squares, wide.sqr()?.sum(1)?.to_vec1::<f32>()?);
                let gap = (matrix.constant_times(&x)? - x.matmul(&wide.t()?)?)?.abs()?.max_all()?;
                assert!(gap.to_scalar::<f32>()? < 1e-4, "{outputs} {inputs} {dtype:?}: {gap}");
            }
        }
        Ok(())
    }
}
