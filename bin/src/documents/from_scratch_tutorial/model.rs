//! Model and data of the from-scratch tutorial: one linear layer, y = w x + b.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use ops::{Linear, linear};
use sampler::{Generator, SamplerError};
use training::{FileError, TensorFile};

/// One x and its y.
pub(crate) type Sample = (f32, f32);

/// Generates y = 2 x + 3 + 0.1 noise, rounded after each operation as PyTorch does.
///
/// # Errors
/// More samples than there is memory for.
pub(crate) fn draw(generator: &mut Generator, len: usize) -> std::result::Result<Vec<Sample>, SamplerError> {
    let x = generator.randn(len)?;
    let noise = generator.randn(len)?;
    Ok(x.into_iter().zip(noise).map(|(x, noise)| (x, (2.0 * x + 3.0) + 0.1 * noise)).collect())
}

/// Reads `x` and `y`, f32 of shape (samples, 1).
///
/// # Errors
/// A file that does not fit.
pub(crate) fn read(file: &TensorFile) -> std::result::Result<Vec<Sample>, FileError> {
    let x = file.samples("x", 1, &Device::Cpu)?;
    file.only(&["x", "y"])?;
    let y = file.tensor("y", &[Some(x.elem_count()), Some(1)], DType::F32, &Device::Cpu)?;
    let values = |tensor: Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    let both = values(x).and_then(|x| Ok(x.into_iter().zip(values(y)?).collect()));
    both.map_err(|error| FileError::read(file.path(), error))
}

/// `nn.Linear(1, 1)` under the name `linear`.
#[derive(Debug)]
pub(crate) struct SimpleModel {
    linear: Linear,
}

impl SimpleModel {
    /// Creates the layer.
    ///
    /// # Errors
    /// Those of the builder.
    pub(crate) fn new(builder: VarBuilder<'_>) -> Result<Self> {
        Ok(Self { linear: linear(1, 1, builder.pp("linear"))? })
    }
}

impl Module for SimpleModel {
    /// # Shapes
    /// (batch, 1) to (batch, 1).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.linear.forward(x)
    }
}
