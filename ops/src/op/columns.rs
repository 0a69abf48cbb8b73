//! Selection of adjacent columns.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, bail};

use super::width;
use crate::dense::{dense, with_numbers};
use crate::real::Real;
use crate::tape;

const NAME: &str = "columns";

/// Selects a range of the last dimension as `x.narrow(D::Minus1, ..)` does, but as an operation that
/// [`backward`](crate::tape::backward) knows, with a contiguous result: for example the queries of a layer that computes queries,
/// keys and values together.
///
/// # Shapes
/// `(.., size)` to `(.., columns.len())`.
///
/// # Cost
/// A copy forward, and a zeroed tensor and a copy backward.
///
/// # Errors
/// Columns out of range.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.0]], &Device::Cpu)?;
/// assert_eq!(ops::columns(&x, 1..3)?.to_vec2::<f32>()?, [[2.0, 3.0], [5.0, 6.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn columns(x: &Tensor, columns: Range<usize>) -> candle_core::Result<Tensor> {
    let size = x.dims().last().copied().unwrap_or_default();
    if columns.start > columns.end || columns.end > size {
        bail!("{NAME}: there are no columns {columns:?} in {:?}", x.dims())
    }
    match x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64) {
        true => tape::apply_op1(&x.contiguous()?, Columns(columns)),
        false if columns.is_empty() || x.elem_count() == 0 => {
            x.narrow(x.rank() - 1, columns.start, columns.len())
        }
        false => {
            let y = x.detach().narrow(x.rank() - 1, columns.start, columns.len())?.force_contiguous()?;
            tape::explicit_op1(NAME, [x], y, move |[x], gradient| {
                let gradient = gradient.detach();
                Ok([Some(gradient.pad_with_zeros(x.rank() - 1, columns.start, size - columns.end)?)])
            })
        }
    }
}

struct Columns(Range<usize>);

impl Columns {
    fn forward<T: Real>(&self, x: &[T], width: usize) -> Vec<T> {
        let mut out = Vec::with_capacity(x.len() / width * self.0.len());
        x.chunks_exact(width).for_each(|row| out.extend_from_slice(&row[self.0.clone()]));
        out
    }

    fn backward<T: Real>(&self, x: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let mut out = vec![T::zero(); x.elem_count()];
        with_numbers(gradient, |gradient: &[T]| {
            let rows = gradient.chunks_exact(self.0.len().max(1));
            for (out, row) in out.chunks_exact_mut(width(x.dims())).zip(rows) {
                out[self.0.clone()].copy_from_slice(row);
            }
            Ok(())
        })?;
        Tensor::from_vec(out, x.shape(), x.device())
    }
}

impl CustomOp1 for Columns {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (mut dims, width) = (layout.dims().to_vec(), width(layout.dims()));
        let out = match x {
            CpuStorage::F32(_) => CpuStorage::F32(self.forward(dense(x, layout)?, width)),
            CpuStorage::F64(_) => CpuStorage::F64(self.forward(dense(x, layout)?, width)),
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        dims.pop();
        dims.push(self.0.len());
        Ok((out, Shape::from(dims)))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        match x.dtype() {
            DType::F32 => self.backward::<f32>(x, &gradient).map(Some),
            _ => self.backward::<f64>(x, &gradient).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    #[test]
    fn columns_and_gradients_equal_candles() -> candle_core::Result<()> {
        for dims in [&[6][..], &[4, 6], &[2, 3, 6]] {
            let x = Var::from_tensor(&Tensor::randn(0f64, 1.0, dims, &Device::Cpu)?)?;
            for range in [0..6, 0..2, 2..5, 5..6] {
                let both = [columns(&x, range.clone())?, x.narrow(dims.len() - 1, range.start, range.len())?];
                assert_agree(both, |y| y.sqr()?.sum_all(), &[&x], 0.0, NAME)?;
            }
            assert!(columns(&x, 5..7).is_err());
        }
        let x = Var::zeros((2, 6), DType::BF16, &Device::Cpu)?;
        let some = columns(&x, 2..5)?;
        assert!(some.is_contiguous() && tape::knows(&tape::scalar_with_gradient(&some, some.ones_like()?)?));
        assert_eq!(columns(&Tensor::zeros((2, 6), DType::F32, &Device::Cpu)?, 3..3)?.dims(), [2, 0]);
        assert_eq!(columns(&Tensor::zeros((0, 6), DType::F32, &Device::Cpu)?, 1..3)?.dims(), [0, 2]);
        Ok(())
    }
}
