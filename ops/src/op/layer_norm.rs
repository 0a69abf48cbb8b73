//! Layer normalisation over the last dimension.

use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Module, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::cast::cast;
use super::{check_parameter, width, working_dtype};
use crate::cuda;
use crate::dense::{dense, with_numbers};
use crate::real::{Real, sum, sum_pairs};
use crate::simd::vectorized;
use crate::{Result, tape};

const NAME: &str = "layer_norm";

/// Rows whose gradients of weight and bias are summed before they are added to the total: the rounding error of a sum
/// grows with its length.
const BLOCK: usize = 64;

/// Layer normalisation over the last dimension, with gradients for input, weight and bias
/// (through candle_nn's `LayerNorm` no gradient passes).
///
/// `(x - mean) / sqrt(variance + eps) * weight + bias`, with the mean and the population variance of each row.
///
/// # Shapes
/// Input `(.., size)`, weight and bias `(size)`; the result has the input's shape.
///
/// # Cost
/// On a CPU three short passes forward and four backward, row by row; only the input is kept for backward.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
/// let norm = ops::layer_norm(2, 1e-5, builder.pp("norm"))?; // nn.LayerNorm(2)
/// let y = norm.forward(&Tensor::new(&[[1f64, 3.]], &Device::Cpu)?)?;
/// assert!((y.to_vec2::<f64>()?[0][1] - 1.0).abs() < 1e-5);
/// let grads = y.sqr()?.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

/// Makes a [`LayerNorm`] over rows of `size` with the builder's `weight` and `bias`, initially ones and zeros.
/// PyTorch's `eps` is 1e-5.
///
/// # Errors
/// Variables of these names that exist with another shape.
pub fn layer_norm(size: usize, eps: f64, builder: VarBuilder<'_>) -> candle_core::Result<LayerNorm> {
    let weight = builder.get_with_hints(size, "weight", Init::Const(1.0))?;
    let bias = builder.get_with_hints(size, "bias", Init::Const(0.0))?;
    Ok(LayerNorm { weight, bias, eps })
}

impl LayerNorm {
    /// A layer with the given weight and bias.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias, eps }
    }

    /// The weight, by which the normalised rows are multiplied.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, added after the multiplication by the weight.
    pub fn bias(&self) -> &Tensor {
        &self.bias
    }

    fn check(&self, x: &Tensor) -> Result<()> {
        check_parameter(NAME, "weight", &self.weight, x)?;
        check_parameter(NAME, "bias", &self.bias, x)
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.check(x)?;
        if cuda::knows(x) {
            let [x, weight, bias] = [&x.contiguous()?, &self.weight.contiguous()?, &self.bias.contiguous()?];
            let y = cuda::layer_norm(&x.detach(), &weight.detach(), &bias.detach(), self.eps)?;
            let eps = self.eps;
            return tape::explicit_op3(NAME, [x, weight, bias], y, move |[x, weight, _], gradient| {
                let gradient = gradient.detach().contiguous()?;
                Ok(cuda::layer_norm_backward(&x.detach(), &weight.detach(), &gradient, eps)?.map(Some))
            });
        }
        let dtype = working_dtype(NAME, x.dtype())?;
        let (wide, weight, bias) = (cast(x, dtype)?, cast(&self.weight, dtype)?, cast(&self.bias, dtype)?);
        let result = if x.device().is_cpu() {
            let op = Rows { eps: self.eps };
            tape::apply_op3(&wide.contiguous()?, &weight.contiguous()?, &bias.contiguous()?, op)?
        } else {
            composed(&wide, &weight, &bias, self.eps)?
        };
        cast(&result, x.dtype())
    }
}

fn composed(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> candle_core::Result<Tensor> {
    let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let deviation = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    x.broadcast_div(&deviation)?.broadcast_mul(weight)?.broadcast_add(bias)
}

struct Rows {
    eps: f64,
}

impl Rows {
    /// Returns mean and reciprocal standard deviation of a row.
    #[inline(always)]
    fn moments<T: Real>(&self, row: &[T]) -> (T, T) {
        let count = row.len() as f64;
        let mean = T::from_f64(sum(row, |x| x).to_f64() / count);
        let variance = sum(row, |x| (x - mean) * (x - mean)).to_f64() / count;
        (mean, T::from_f64(1.0 / (variance + self.eps).sqrt()))
    }

    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: &[T], width: usize) -> Vec<T> {
        let mut out = x.to_vec();
        vectorized!({
            for row in out.chunks_exact_mut(width) {
                let (mean, scale) = self.moments(row);
                for ((x, &w), &b) in row.iter_mut().zip(weight).zip(bias) {
                    *x = (*x - mean) * scale * w + b;
                }
            }
        });
        out
    }

    /// Returns the gradients of input, weight and bias.
    fn backward<T: Real>(&self, x: &[T], weight: &[T], gradient: &[T], width: usize) -> [Vec<T>; 3] {
        let zeros = || vec![T::zero(); weight.len()];
        let mut of_x = x.to_vec();
        let mut totals = [zeros(), zeros()];
        let mut scaled = zeros();
        vectorized!({
            for (rows, gradients) in of_x.chunks_mut(BLOCK * width).zip(gradient.chunks(BLOCK * width)) {
                let mut block = [zeros(), zeros()];
                for (row, gradient) in rows.chunks_exact_mut(width).zip(gradients.chunks_exact(width)) {
                    scaled.iter_mut().zip(gradient).zip(weight).for_each(|((h, &g), &w)| *h = g * w);
                    self.backward_row(row, &scaled, gradient, &mut block);
                }
                for (total, part) in totals.iter_mut().zip(&block) {
                    total.iter_mut().zip(part).for_each(|(total, &part)| *total += part);
                }
            }
        });
        let [of_weight, of_bias] = totals;
        [of_x, of_weight, of_bias]
    }

    /// Replaces a row by its gradient: `(h - mean(h) - z mean(h z)) / deviation` with z the normalised row and h,
    /// `scaled`, the gradient times the weight.
    #[inline(always)]
    fn backward_row<T: Real>(
        &self,
        row: &mut [T],
        scaled: &[T],
        gradient: &[T],
        [of_weight, of_bias]: &mut [Vec<T>; 2],
    ) {
        let count = T::from_f64(row.len() as f64);
        let (mean, scale) = self.moments(row);
        for (((x, &g), dw), db) in row.iter_mut().zip(gradient).zip(of_weight).zip(of_bias) {
            *x = (*x - mean) * scale;
            *dw += g * *x;
            *db += g;
        }
        let plain = sum(scaled, |h| h) / count;
        let along = sum_pairs(scaled, row, |h, z| h * z) / count;
        for (z, &h) in row.iter_mut().zip(scaled) {
            *z = scale * (h - plain - *z * along);
        }
    }

    fn gradients<T: Real>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<[Tensor; 3]> {
        let [of_x, of_weight, of_bias] = with_numbers(x, |x| {
            with_numbers(weight, |w| {
                with_numbers(gradient, |g| Ok(self.backward::<T>(x, w, g, width(gradient.dims()))))
            })
        })?;
        let device = x.device();
        Ok([
            Tensor::from_vec(of_x, x.shape(), device)?,
            Tensor::from_vec(of_weight, weight.shape(), device)?,
            Tensor::from_vec(of_bias, weight.shape(), device)?,
        ])
    }
}

impl CustomOp3 for Rows {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let width = width(x_layout.dims());
        let out = match x {
            CpuStorage::F32(_) => CpuStorage::F32(self.forward(
                dense(x, x_layout)?,
                dense(weight, weight_layout)?,
                dense(bias, bias_layout)?,
                width,
            )),
            CpuStorage::F64(_) => CpuStorage::F64(self.forward(
                dense(x, x_layout)?,
                dense(weight, weight_layout)?,
                dense(bias, bias_layout)?,
                width,
            )),
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let [of_x, of_weight, of_bias] = match x.dtype() {
            DType::F32 => self.gradients::<f32>(x, weight, &gradient)?,
            _ => self.gradients::<f64>(x, weight, &gradient)?,
        };
        Ok((Some(of_x), Some(of_weight), Some(of_bias)))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// The fused operation equals the composed one, gradients included; with more rows than a block has.
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        let random = |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f64, 2., shape, &Device::Cpu)?);
        let (x, weight, bias) = (random(&[2, 70, 19])?, random(&[19])?, random(&[19])?);
        let outer = random(&[2, 70, 19])?;
        let norm = LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), 1e-5);
        let both = [composed(&x, &weight, &bias, 1e-5)?, norm.forward(&x)?];
        let loss = |y: &Tensor| (y * outer.as_detached_tensor())?.sum_all();
        assert_agree(both, loss, &[&x, &weight, &bias], 1e-12, "layer norm")
    }
}
