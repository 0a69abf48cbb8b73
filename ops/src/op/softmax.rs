//! Softmax and log-softmax over the last dimension.

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor, bail};

use super::cast::cast;
use super::{width, working_dtype};
use crate::dense::{dense, with_numbers};
use crate::real::{Real, ln, max, sum, sum_pairs};
use crate::simd::vectorized;
use crate::tape;

/// Softmax over the last dimension: `exp(x) / sum(exp(x))`, without overflow, and with a gradient
/// (candle_nn's `softmax_last_dim` has none).
///
/// A row with a NaN or plus infinity, or with minus infinity only, is NaN, as in PyTorch.
///
/// # Shapes
/// Any of at least one dimension; the result has the same shape.
///
/// # Cost
/// On a CPU two passes forward and two backward; the result is kept for backward.
///
/// # Errors
/// A tensor without dimensions, or not of f16, bf16, f32 or f64.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let logits = Var::new(&[[0f32, 0.], [0., f32::NEG_INFINITY]], &Device::Cpu)?;
/// let shares = ops::softmax(&logits)?;
/// assert_eq!(shares.to_vec2::<f32>()?, [[0.5, 0.5], [1.0, 0.0]]);
/// assert!(shares.sqr()?.sum_all()?.backward()?.get(&logits).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    run(x, Kind::Softmax)
}

/// The logarithm of [`softmax`] over the last dimension: `x - ln(sum(exp(x)))`, without overflow.
///
/// # Shapes
/// Any of at least one dimension; the result has the same shape.
///
/// # Cost
/// On a CPU three passes forward and two backward; the result is kept for backward.
///
/// # Errors
/// A tensor without dimensions, or not of f16, bf16, f32 or f64.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let logits = Tensor::new(&[1e4f32, -1e4], &Device::Cpu)?;
/// assert_eq!(ops::log_softmax(&logits)?.to_vec1::<f32>()?, [0.0, -2e4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn log_softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    run(x, Kind::LogSoftmax)
}

fn run(x: &Tensor, kind: Kind) -> candle_core::Result<Tensor> {
    x.dim(D::Minus1)?;
    let wide = cast(x, working_dtype(kind.name(), x.dtype())?)?;
    let result = if x.device().is_cpu() {
        tape::apply_op1(&wide.contiguous()?, kind)?
    } else {
        composed(&wide, kind)?
    };
    cast(&result, x.dtype())
}

fn composed(x: &Tensor, kind: Kind) -> candle_core::Result<Tensor> {
    // The shift does not change the result, so it needs no gradient.
    let x = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?;
    let exp = x.exp()?;
    let sum = exp.sum_keepdim(D::Minus1)?;
    match kind {
        Kind::Softmax => exp.broadcast_div(&sum),
        Kind::LogSoftmax => x.broadcast_sub(&sum.log()?),
    }
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Softmax,
    LogSoftmax,
}

impl Kind {
    fn forward<T: Real>(self, x: &[T], width: usize) -> Vec<T> {
        let mut out = x.to_vec();
        vectorized!({
            for row in out.chunks_exact_mut(width) {
                self.forward_row(row);
            }
        });
        out
    }

    #[inline(always)]
    fn forward_row<T: Real>(self, row: &mut [T]) {
        let top = max(row);
        match self {
            Self::Softmax => {
                row.iter_mut().for_each(|x| *x = (*x - top).exp_nonpositive());
                let scale = T::one() / sum(row, |x| x);
                row.iter_mut().for_each(|x| *x *= scale);
            }
            Self::LogSoftmax => {
                let rest = ln(sum(row, |x| (x - top).exp_nonpositive()));
                row.iter_mut().for_each(|x| *x = *x - top - rest);
            }
        }
    }

    /// Gradient from the result y and its gradient g: `y (g - sum(g y))`; for log-softmax `g - exp(y) sum(g)`.
    fn backward<T: Real>(self, y: &[T], gradient: &[T], width: usize) -> Vec<T> {
        let mut out = gradient.to_vec();
        vectorized!({
            for (row, y) in out.chunks_exact_mut(width).zip(y.chunks_exact(width)) {
                self.backward_row(row, y);
            }
        });
        out
    }

    #[inline(always)]
    fn backward_row<T: Real>(self, row: &mut [T], y: &[T]) {
        match self {
            Self::Softmax => {
                let dot = sum_pairs(row, y, |g, y| g * y);
                row.iter_mut().zip(y).for_each(|(g, &y)| *g = (*g - dot) * y);
            }
            Self::LogSoftmax => {
                let total = sum(row, |g| g);
                row.iter_mut().zip(y).for_each(|(g, &y)| *g -= y.exp_nonpositive() * total);
            }
        }
    }

    fn gradient<T: Real>(self, y: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let out = with_numbers(y, |y| {
            with_numbers(gradient, |g| Ok(self.backward::<T>(y, g, width(gradient.dims()))))
        })?;
        Tensor::from_vec(out, gradient.shape(), gradient.device())
    }
}

impl CustomOp1 for Kind {
    fn name(&self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::LogSoftmax => "log_softmax",
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let width = width(layout.dims());
        let out = match storage {
            CpuStorage::F32(_) => CpuStorage::F32(self.forward(dense(storage, layout)?, width)),
            CpuStorage::F64(_) => CpuStorage::F64(self.forward(dense(storage, layout)?, width)),
            _ => bail!("{}: neither f32 nor f64", self.name()),
        };
        Ok((out, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, result: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        match gradient.dtype() {
            DType::F32 => self.gradient::<f32>(result, &gradient).map(Some),
            _ => self.gradient::<f64>(result, &gradient).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// The fused operation equals the composed one, gradient included.
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        for kind in [Kind::Softmax, Kind::LogSoftmax] {
            let x = Var::from_tensor(&Tensor::randn(0f64, 3., (3, 2, 19), &Device::Cpu)?)?;
            let weights = Tensor::randn(0f64, 1., (3, 2, 19), &Device::Cpu)?;
            let both = [composed(&x, kind)?, run(&x, kind)?];
            assert_agree(both, |y| (y * &weights)?.sum_all(), &[&x], 1e-13, kind.name())?;
        }
        Ok(())
    }
}
