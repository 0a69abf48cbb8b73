//! Model and data of the PyTorch handbook's data-parallel example: two layers with a ReLU between them.

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use ops::{Linear, linear, relu};
use sampler::{Generator, SamplerError};
use training::{FileError, TensorFile};

/// Features of a sample.
pub const FEATURES: usize = 10;
/// Number of classes.
pub const CLASSES: usize = 2;
const HIDDEN: usize = 20;

/// Features and class.
pub type Sample = ([f32; FEATURES], u32);

/// Features (batch, 10) and classes (batch).
pub type Batch = (Tensor, Tensor);

/// Draws all features, then all classes.
///
/// # Errors
/// More samples than there is memory for.
pub fn draw(generator: &mut Generator, len: usize) -> std::result::Result<Vec<Sample>, SamplerError> {
    let x = generator.randn(len.saturating_mul(FEATURES))?;
    let y = generator.randint(len, 0, CLASSES as i64)?;
    let (x, _) = x.as_chunks::<FEATURES>();
    Ok(x.iter().copied().zip(y.into_iter().map(|class| class as u32)).collect())
}

/// Reads features, f32 of shape (samples, 10), and classes, i64 of shape (samples), by their names in the file.
///
/// # Errors
/// A file that does not fit.
pub fn read(file: &TensorFile, x: &str, y: &str) -> std::result::Result<Vec<Sample>, FileError> {
    let x = file.samples(x, FEATURES, &Device::Cpu)?;
    let y = file.classes(y, x.elem_count() / FEATURES, CLASSES)?;
    let x = x.flatten_all().and_then(|x| x.to_vec1());
    let x: Vec<f32> = x.map_err(|error| FileError::read(file.path(), error))?;
    let (x, _) = x.as_chunks::<FEATURES>();
    Ok(x.iter().copied().zip(y).collect())
}

/// Returns samples as a batch on a device.
///
/// # Errors
/// Memory that a device does not have.
pub fn batch(samples: &[Sample], device: &Device) -> Result<Batch> {
    let (x, y): (Vec<[f32; FEATURES]>, Vec<u32>) = samples.iter().copied().unzip();
    let len = samples.len();
    Ok((Tensor::from_vec(x.into_flattened(), (len, FEATURES), device)?, Tensor::from_vec(y, len, device)?))
}

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
        self.second.forward(&relu(&self.first.forward(x)?)?)
    }
}
