//! Initial values of PyTorch's layers, drawn in PyTorch's order.
//!
//! Each function draws what the constructor of the same name in `torch.nn` draws, weight before bias, so that calling
//! them in the order in which a model creates its layers returns that model's initial values for a seed.
//! Layers that draw nothing (`LayerNorm`: weight 1, bias 0) have no function here.
//!
//! ```
//! use sampler::{Generator, initial};
//!
//! # fn main() -> Result<(), sampler::SamplerError> {
//! let mut generator = Generator::new(42);
//! let layer = initial::linear(&mut generator, 1, 1)?; // nn.Linear(1, 1)
//! assert_eq!((layer.weight[0], layer.bias[0]), (0.7645385, 0.8300079));
//! # Ok(())
//! # }
//! ```

use crate::{Generator, SamplerError};

/// Weight and bias of one layer, each in the row-major order of PyTorch's tensor of that name.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightAndBias {
    /// The weight.
    pub weight: Vec<f32>,
    /// The bias.
    pub bias: Vec<f32>,
}

/// `nn.Linear(in_features, out_features)`.
///
/// # Shapes
///
/// Weight `out_features x in_features`, bias `out_features`.
///
/// # Errors
///
/// If the weight has more elements than fit in memory.
pub fn linear(
    generator: &mut Generator,
    in_features: usize,
    out_features: usize,
) -> Result<WeightAndBias, SamplerError> {
    let weight = linear_weight(generator, in_features, out_features)?;
    Ok(WeightAndBias { weight, bias: bias(generator, out_features, in_features)? })
}

/// The weight of `nn.Linear(in_features, out_features)`: all that it draws with `bias=False`.
///
/// # Shapes
///
/// `out_features x in_features`.
///
/// # Errors
///
/// If the weight has more elements than fit in memory.
pub fn linear_weight(
    generator: &mut Generator,
    in_features: usize,
    out_features: usize,
) -> Result<Vec<f32>, SamplerError> {
    weight(generator, count(&[out_features, in_features])?, in_features)
}

/// `nn.Conv2d(in_channels, out_channels, kernel_size, groups=groups)`.
///
/// # Shapes
///
/// Weight `out_channels x (in_channels / groups) x height x width` for a kernel of `(height, width)`; bias
/// `out_channels`.
///
/// # Errors
///
/// If the channels are not divisible by the groups, or the weight has more elements than fit in memory.
pub fn conv2d(
    generator: &mut Generator,
    in_channels: usize,
    out_channels: usize,
    kernel_size: (usize, usize),
    groups: usize,
) -> Result<WeightAndBias, SamplerError> {
    if groups == 0 || !in_channels.is_multiple_of(groups) || !out_channels.is_multiple_of(groups) {
        return Err(SamplerError::Groups { in_channels, out_channels, groups });
    }
    let fan_in = count(&[in_channels / groups, kernel_size.0, kernel_size.1])?;
    let weight = weight(generator, count(&[out_channels, fan_in])?, fan_in)?;
    Ok(WeightAndBias { weight, bias: bias(generator, out_channels, fan_in)? })
}

/// The weight of `nn.Embedding(num_embeddings, embedding_dim)`: normal numbers.
///
/// # Shapes
///
/// `num_embeddings x embedding_dim`.
///
/// # Errors
///
/// If the weight has more elements than fit in memory.
pub fn embedding(
    generator: &mut Generator,
    num_embeddings: usize,
    embedding_dim: usize,
) -> Result<Vec<f32>, SamplerError> {
    generator.randn(count(&[num_embeddings, embedding_dim])?)
}

/// Draws `len` elements of a weight with this `fan_in` (inputs to each output): uniform in +-1/sqrt(fan_in).
///
/// # Errors
///
/// If memory is exhausted.
///
/// # Source
///
/// He et al., "Delving Deep into Rectifiers" (2015), with PyTorch's slope of sqrt(5); the bound is computed in
/// PyTorch's steps, which do not always round to 1/sqrt(fan_in).
pub fn weight(generator: &mut Generator, len: usize, fan_in: usize) -> Result<Vec<f32>, SamplerError> {
    let slope = 5f64.sqrt();
    let gain = (2.0 / (1.0 + slope * slope)).sqrt();
    let deviation = gain / (fan_in.max(1) as f64).sqrt();
    let bound = 3f64.sqrt() * deviation;
    generator.uniform(len, -bound, bound)
}

/// Draws `len` biases of a layer with this `fan_in` (inputs to each output): uniform in +-1/sqrt(fan_in).
///
/// # Errors
///
/// If memory is exhausted.
pub fn bias(generator: &mut Generator, len: usize, fan_in: usize) -> Result<Vec<f32>, SamplerError> {
    let bound = if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f64).sqrt() };
    generator.uniform(len, -bound, bound)
}

fn count(dims: &[usize]) -> Result<usize, SamplerError> {
    dims.iter()
        .try_fold(1usize, |product, &dim| product.checked_mul(dim))
        .ok_or_else(|| SamplerError::TooManyElements { dims: dims.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_layers_are_errors() {
        let mut generator = Generator::new(0);
        assert!(matches!(linear(&mut generator, usize::MAX, 2), Err(SamplerError::TooManyElements { .. })));
        for groups in [0, 2] {
            let layer = conv2d(&mut generator, 3, 4, (1, 1), groups);
            assert!(matches!(layer, Err(SamplerError::Groups { .. })));
        }
        assert!(conv2d(&mut generator, 3, 3, (usize::MAX, 2), 1).is_err());
        assert_eq!(generator, Generator::new(0));
    }

    #[test]
    fn layers_without_inputs_have_bias_zero() {
        let layer = linear(&mut Generator::new(0), 0, 3).unwrap();
        assert_eq!((layer.weight.len(), layer.bias), (0, vec![0.0; 3]));
    }
}
