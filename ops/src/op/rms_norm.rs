//! RMS norm over the last dimension.

use candle_core::{CpuStorage, CustomOp2, D, DType, Layout, Module, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::cast::cast;
use super::{check_parameter, width, working_dtype};
use crate::blocks::{blocks, of_rows};
use crate::dense::{dense, with_numbers};
use crate::real::{Real, sum, sum_pairs};
use crate::simd::vectorized;
use crate::{cuda, tape};

const NAME: &str = "rms_norm";

/// Rows of a block in backward; each block has its own sum of the weight's gradient.
const ROWS: usize = 64;

/// Divides each row by the root of the mean of its squares and multiplies it by `weight`, with fused gradients
/// (candle_nn's `RmsNorm` has none for its input on a CPU, nor for its weight).
///
/// f16 and bf16 are computed in f32 and rounded once, as PyTorch's `nn.RMSNorm` does.
///
/// # Shapes
/// Input and result `(.., size)`, weight `(size)`.
///
/// # Cost
/// On a CPU two passes over a row forward and three backward, rows in parallel; only the input is kept. The bits do
/// not depend on the number of threads.
///
/// # Errors
/// `forward` refuses an input whose last dimension is not `size`, whose dtype is not the weight's, or that is not of f16, bf16, f32
/// or f64.
///
/// # Source
/// Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
/// let norm = ops::rms_norm(2, 1e-6, builder.pp("norm"))?; // nn.RMSNorm(2, eps=1e-6)
/// let y = norm.forward(&Tensor::new(&[[1f64, 7.]], &Device::Cpu)?)?;
/// assert!((y.to_vec2::<f64>()?[0][1] - 1.4).abs() < 1e-5);
/// let grads = y.sqr()?.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| grads.get(var).is_some()));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

/// Makes an [`RmsNorm`] over rows of `size` with the builder's `weight`, initially ones.
///
/// # Errors
/// A variable of this name that exists with another shape.
pub fn rms_norm(size: usize, eps: f64, builder: VarBuilder<'_>) -> candle_core::Result<RmsNorm> {
    Ok(RmsNorm { weight: builder.get_with_hints(size, "weight", Init::Const(1.0))?, eps })
}

impl RmsNorm {
    /// A layer with the given weight.
    ///
    /// ```
    /// use candle_core::{Device, Module, Tensor};
    /// use ops::RmsNorm;
    ///
    /// let norm = RmsNorm::new(Tensor::new(&[1f32, 2.], &Device::Cpu)?, 0.0);
    /// let y = norm.forward(&Tensor::new(&[3f32, 3.], &Device::Cpu)?)?;
    /// assert_eq!(y.to_vec1::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps }
    }

    /// The weight, by which the normalised rows are multiplied.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The term added to the mean of squares, which avoids a division by zero for a row of zeros.
    pub fn eps(&self) -> f64 {
        self.eps
    }
}

impl RmsNorm {
    /// Normalises each head by itself: each run of `size` elements of the last dimension, which holds several.
    ///
    /// # Errors
    /// A last dimension that is not a multiple of `size`; errors of `forward`.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use ops::RmsNorm;
    ///
    /// let norm = RmsNorm::new(Tensor::new(&[1f32, 2.], &Device::Cpu)?, 0.0);
    /// let y = norm.forward_heads(&Tensor::new(&[[3f32, 3., 5., 5.]], &Device::Cpu)?)?;
    /// assert_eq!(y.to_vec2::<f32>()?, [[1.0, 2.0, 1.0, 2.0]]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_heads(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (size, mut dims) = (self.weight.elem_count(), x.dims().to_vec());
        let heads = dims.pop().filter(|width| size > 0 && width % size == 0).map(|width| width / size);
        let Some(heads) = heads else { return self.forward(x) };
        if cuda::knows(x) && x.dtype() == self.weight.dtype() {
            return self.on_cuda(x);
        }
        match x.device().is_cpu()
            && x.dtype() == self.weight.dtype()
            && matches!(x.dtype(), DType::F32 | DType::F64)
        {
            true => tape::apply_op2(&x.contiguous()?, &self.weight.contiguous()?, Rows { eps: self.eps }),
            false => {
                dims.extend([heads, size]);
                self.forward(&x.reshape(dims)?)?.reshape(x.dims())
            }
        }
    }
}

impl RmsNorm {
    fn on_cuda(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (x, weight) = (x.contiguous()?, self.weight.contiguous()?);
        let y = cuda::rms_norm(&x.detach(), &weight.detach(), self.eps)?;
        let eps = self.eps;
        tape::explicit_op2(NAME, [&x, &weight], y, move |[x, weight], gradient| {
            let gradient = gradient.detach().contiguous()?;
            Ok(cuda::rms_norm_backward(&x.detach(), &weight.detach(), &gradient, eps)?.map(Some))
        })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        check_parameter(NAME, "weight", &self.weight, x)?;
        if cuda::knows(x) {
            return self.on_cuda(x);
        }
        let dtype = working_dtype(NAME, x.dtype())?;
        let (wide, weight) = (cast(x, dtype)?, cast(&self.weight, dtype)?);
        let result = if x.device().is_cpu() {
            tape::apply_op2(&wide.contiguous()?, &weight.contiguous()?, Rows { eps: self.eps })?
        } else {
            composed(&wide, &weight, self.eps)?
        };
        cast(&result, x.dtype())
    }
}

fn composed(x: &Tensor, weight: &Tensor, eps: f64) -> candle_core::Result<Tensor> {
    let root = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    x.broadcast_div(&root)?.broadcast_mul(weight)
}

struct Rows {
    eps: f64,
}

impl Rows {
    /// Reciprocal root of the mean of squares.
    #[inline(always)]
    fn scale<T: Real>(&self, row: &[T]) -> T {
        let mean = sum(row, |x| x * x).to_f64() / row.len() as f64;
        T::from_f64(1.0 / (mean + self.eps).sqrt())
    }

    fn forward<T: Real>(&self, x: &[T], weight: &[T], width: usize) -> Vec<T> {
        let mut out = vec![T::zero(); x.len()];
        blocks([&mut out], of_rows(width), |at, [out]| {
            vectorized!({
                for (out, row) in out.chunks_exact_mut(width).zip(x[at..].chunks_exact(width)) {
                    let scale = self.scale(row);
                    for ((out, &x), &w) in out.iter_mut().zip(row).zip(weight) {
                        *out = x * scale * w;
                    }
                }
            });
        });
        out
    }

    /// Returns the gradients of input and weight. With z the normalised row and h the gradient times the weight, a
    /// row's is `scale (h - z mean(h z))`.
    fn backward<T: Real>(&self, x: &[T], weight: &[T], gradient: &[T], width: usize) -> [Vec<T>; 2] {
        let mut of_x = vec![T::zero(); x.len()];
        let parts = blocks([&mut of_x], ROWS * width, |at, [of_x]| {
            let mut of_weight = vec![T::zero(); weight.len()];
            vectorized!({
                let rows = x[at..].chunks_exact(width).zip(gradient[at..].chunks_exact(width));
                for (out, (row, gradient)) in of_x.chunks_exact_mut(width).zip(rows) {
                    self.backward_row(out, row, weight, gradient, &mut of_weight);
                }
            });
            of_weight
        });
        let mut of_weight = vec![T::zero(); weight.len()];
        for part in parts {
            of_weight.iter_mut().zip(&part).for_each(|(total, &part)| *total += part);
        }
        [of_x, of_weight]
    }

    #[inline(always)]
    fn backward_row<T: Real>(
        &self,
        out: &mut [T],
        row: &[T],
        weight: &[T],
        gradient: &[T],
        of_weight: &mut [T],
    ) {
        let scale = self.scale(row);
        for (((out, dw), (&x, &g)), &w) in
            out.iter_mut().zip(of_weight).zip(row.iter().zip(gradient)).zip(weight)
        {
            *out = g * w;
            *dw += g * x * scale;
        }
        let along = sum_pairs(out, row, |h, x| h * x) * scale / T::from_f64(row.len() as f64);
        for (out, &x) in out.iter_mut().zip(row) {
            *out = scale * (*out - x * scale * along);
        }
    }

    fn gradients<T: Real>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [of_x, of_weight] = with_numbers(x, |x| {
            with_numbers(weight, |w| {
                with_numbers(gradient, |g| Ok(self.backward::<T>(x, w, g, width(weight.dims()))))
            })
        })?;
        let of_x = Tensor::from_vec(of_x, x.shape(), x.device())?;
        Ok((Some(of_x), Some(Tensor::from_vec(of_weight, weight.shape(), x.device())?)))
    }
}

impl CustomOp2 for Rows {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        // Rows are as long as the weight; the last dimension of x may hold several (heads).
        let width = width(weight_layout.dims());
        let out = match x {
            CpuStorage::F32(_) => {
                CpuStorage::F32(self.forward(dense(x, x_layout)?, dense(weight, weight_layout)?, width))
            }
            CpuStorage::F64(_) => {
                CpuStorage::F64(self.forward(dense(x, x_layout)?, dense(weight, weight_layout)?, width))
            }
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((out, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        match x.dtype() {
            DType::F32 => self.gradients::<f32>(x, weight, &gradient),
            _ => self.gradients::<f64>(x, weight, &gradient),
        }
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
        let (x, weight) = (random(&[2, 70, 19])?, random(&[19])?);
        let outer = random(&[2, 70, 19])?;
        let norm = RmsNorm::new(weight.as_tensor().clone(), 1e-5);
        let both = [composed(&x, &weight, 1e-5)?, norm.forward(&x)?];
        let loss = |y: &Tensor| (y * outer.as_detached_tensor())?.sum_all();
        assert_agree(both, loss, &[&x, &weight], 1e-12, NAME)
    }
}
