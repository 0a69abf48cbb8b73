//! Data of the Trainer tutorial: random samples of 20 features and a label.

use candle_core::{DType, Device, Result, Tensor};
use sampler::{Generator, SamplerError};
use training::{FileError, TensorFile};

/// Features of a sample.
pub(crate) const FEATURES: usize = 20;

/// Features and label.
pub(crate) type Sample = ([f32; FEATURES], f32);

/// Features (batch, 20) and labels (batch, 1).
pub(crate) type Batch = (Tensor, Tensor);

/// Generates the samples one by one: features (uniform), then the label (normal).
///
/// # Errors
/// More samples than there is memory for.
pub(crate) fn draw(generator: &mut Generator, len: usize) -> std::result::Result<Vec<Sample>, SamplerError> {
    let mut samples = Vec::new();
    samples.try_reserve_exact(len).map_err(|_| SamplerError::OutOfMemory { what: "samples", len })?;
    for _ in 0..len {
        let (mut x, mut y) = ([0.0; FEATURES], [0.0]);
        generator.fill_rand(&mut x);
        generator.fill_randn(&mut y);
        samples.push((x, y[0]));
    }
    Ok(samples)
}

/// Reads `x`, f32 of shape (samples, 20), and `y`, f32 of shape (samples, 1).
///
/// # Errors
/// A file that does not fit.
pub(crate) fn read(file: &TensorFile) -> std::result::Result<Vec<Sample>, FileError> {
    let x = file.samples("x", FEATURES, &Device::Cpu)?;
    file.only(&["x", "y"])?;
    let y = file.tensor("y", &[Some(x.elem_count() / FEATURES), Some(1)], DType::F32, &Device::Cpu)?;
    let values = |tensor: Tensor| tensor.flatten_all()?.to_vec1::<f32>();
    let (x, y) =
        values(x).and_then(|x| Ok((x, values(y)?))).map_err(|error| FileError::read(file.path(), error))?;
    let (x, _) = x.as_chunks::<FEATURES>();
    Ok(x.iter().copied().zip(y).collect())
}

/// Returns samples as a batch on a device.
///
/// # Errors
/// Memory that a device does not have.
pub(crate) fn batch(samples: Vec<Sample>, device: &Device) -> Result<Batch> {
    let len = samples.len();
    let (x, y): (Vec<[f32; FEATURES]>, Vec<f32>) = samples.into_iter().unzip();
    let x = Tensor::from_vec(x.into_flattened(), (len, FEATURES), device)?;
    Ok((x, Tensor::from_vec(y, (len, 1), device)?))
}
