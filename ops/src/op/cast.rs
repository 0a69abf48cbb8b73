//! Casts that `tape::backward` knows, vectorized on a CPU: candle's would end its way through the graph, and are several
//! times slower.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use half::{bf16, f16};

use crate::blocks::{BLOCK, blocks_of_work};
use crate::dense::dense;
use crate::product::Narrow;
use crate::tape;

/// `x.to_dtype(dtype)`; on a CPU, between f32 and f16 or bf16, vectorized and known to [`backward`](crate::tape::backward).
///
/// # Cost
/// None if `x` has this dtype.
///
/// # Errors
/// candle's.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::new(&[1f32, 1.001], &Device::Cpu)?;
/// assert_eq!(ops::cast(&ops::cast(&x, DType::BF16)?, DType::F32)?.to_vec1::<f32>()?, [1.0, 1.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let is_narrow = |dtype| matches!(dtype, DType::F16 | DType::BF16);
    let is_ours =
        (x.dtype() == DType::F32 && is_narrow(dtype)) || (is_narrow(x.dtype()) && dtype == DType::F32);
    match is_ours && x.device().is_cpu() {
        true => tape::apply_op1(x, Cast(dtype)),
        false => x.to_dtype(dtype),
    }
}

struct Cast(DType);

fn contiguous(x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Layout)> {
    let shape = layout.shape();
    let mut copy = CpuDevice.zeros_impl(shape, x.dtype())?;
    x.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, Layout::contiguous(shape)))
}

fn converted<A: Copy + Sync, B: Copy + Default + Send>(from: &[A], convert: fn(&[A], &mut [B])) -> Vec<B> {
    let mut to = vec![B::default(); from.len()];
    blocks_of_work([&mut to], BLOCK, from.len(), |at, [to]| convert(&from[at..at + to.len()], to));
    to
}

impl CustomOp1 for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        // A copy of a view lasts no longer than the cast.
        let copy = if layout.is_contiguous() { None } else { Some(contiguous(x, layout)?) };
        let dims = layout.shape().clone();
        let (x, layout) = copy.as_ref().map_or((x, layout), |(x, layout)| (x, layout));
        let found = match (x, self.0) {
            (CpuStorage::F16(_), DType::F32) => {
                CpuStorage::F32(converted(dense(x, layout)?, f16::widen_into))
            }
            (CpuStorage::BF16(_), DType::F32) => {
                CpuStorage::F32(converted(dense(x, layout)?, bf16::widen_into))
            }
            (CpuStorage::F32(_), DType::F16) => {
                CpuStorage::F16(converted(dense(x, layout)?, f16::narrow_into))
            }
            (CpuStorage::F32(_), DType::BF16) => {
                CpuStorage::BF16(converted(dense(x, layout)?, bf16::narrow_into))
            }
            (_, dtype) => bail!("a cast to {dtype:?} is left to candle"),
        };
        Ok((found, dims))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        cast(&gradient.detach(), x.dtype()).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// As candle's, also of views, and the gradient is cast back.
    #[test]
    fn casts_are_candles() -> Result<()> {
        for dims in [&[][..], &[0], &[3, 70, 333]] {
            let x = Tensor::randn(0f32, 1., dims, &Device::Cpu)?;
            for (from, to) in [
                (DType::F32, DType::BF16),
                (DType::BF16, DType::F32),
                (DType::F32, DType::F16),
                (DType::F16, DType::F32),
                (DType::F64, DType::F16),
                (DType::F32, DType::F32),
            ] {
                let x = Var::from_tensor(&x.to_dtype(from)?)?;
                let view = if dims.len() > 1 { x.transpose(0, 1)? } else { x.as_tensor().clone() };
                let numbers = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
                let [ours, candles] = [cast(&view, to)?, view.to_dtype(to)?];
                assert_eq!((ours.dtype(), ours.dims()), (to, view.dims()));
                assert_eq!(numbers(&ours)?, numbers(&candles)?, "{from:?} {to:?}");
                let gradient = |y: &Tensor| {
                    let factor = (Tensor::ones(y.dims(), to, &Device::Cpu)? * 1.2345)?;
                    let grads = tape::backward(&tape::scalar_with_gradient(y, factor)?)?;
                    numbers(grads.get(&x).expect("a gradient"))
                };
                assert_eq!(gradient(&ours)?, gradient(&candles)?, "{from:?} {to:?}");
            }
        }
        Ok(())
    }
}
