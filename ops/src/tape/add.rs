//! Addition and scaling that `backward` knows.

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor,
};
use half::slice::HalfFloatSliceExt;

use crate::tape::{apply_op1, apply_op2};

/// `a + b` for equal shapes, as an operation known to [`backward`](crate::tape::backward): for example a residual
/// connection. Only tensors that are part of a graph get a gradient.
///
/// # Errors
/// Shapes, dtypes or devices that differ.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let (a, b) = (Var::new(&[1f32, 2.0], &Device::Cpu)?, Var::new(&[3f32, 4.0], &Device::Cpu)?);
/// let sum = ops::tape::add(&a, &b)?;
/// assert_eq!(sum.to_vec1::<f32>()?, [4.0, 6.0]);
/// let grads = ops::tape::backward(&ops::tape::scalar_with_gradient(&sum, Tensor::new(&[5f32, 6.0], &Device::Cpu)?)?)?;
/// assert_eq!(grads.get(&b).unwrap().to_vec1::<f32>()?, [5.0, 6.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    // candle's own addition reports what does not fit.
    let fits = a.shape() == b.shape() && a.dtype() == b.dtype() && a.device().same_device(b.device());
    match fits && (a.track_op() || b.track_op()) && a.dtype().is_float() {
        true => apply_op2(a, b, Add),
        false => a + b,
    }
}

/// Sum of two tensors without a graph.
pub(crate) fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.apply_op2_no_bwd(b, &Add)
}

struct Add;

/// Elements that are converted at a time; they stay in a core's L1 cache.
const BLOCK: usize = 1024;

/// The sums of elements of 16 bits, each rounded once; `None` for operands that are not contiguous. candle's addition of bf16
/// takes ten times as long where the compiler's target has no instructions for it.
fn sum_in_f32<T: Copy + Default>(a: &[T], l: &Layout, b: &[T], m: &Layout) -> Option<Vec<T>>
where
    [T]: HalfFloatSliceExt,
{
    let (begin, end) = l.contiguous_offsets()?;
    let mut sums = a.get(begin..end)?.to_vec();
    let (begin, end) = m.contiguous_offsets()?;
    let others = b.get(begin..end)?;
    let (mut wide, mut other_wide) = ([0f32; BLOCK], [0f32; BLOCK]);
    for (sums, others) in sums.chunks_mut(BLOCK).zip(others.chunks(BLOCK)) {
        let (wide, other_wide) = (&mut wide[..sums.len()], &mut other_wide[..others.len()]);
        sums.convert_to_f32_slice(wide);
        others.convert_to_f32_slice(other_wide);
        wide.iter_mut().zip(&*other_wide).for_each(|(sum, x)| *sum += x);
        sums.convert_from_f32_slice(wide);
    }
    Some(sums)
}

impl CustomOp2 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(&self, a: &CpuStorage, l: &Layout, b: &CpuStorage, m: &Layout) -> Result<(CpuStorage, Shape)> {
        let sum = match (a, b) {
            (CpuStorage::F16(a), CpuStorage::F16(b)) => sum_in_f32(a, l, b, m).map(CpuStorage::F16),
            (CpuStorage::BF16(a), CpuStorage::BF16(b)) => sum_in_f32(a, l, b, m).map(CpuStorage::BF16),
            _ => None,
        };
        let sum = sum.map_or_else(|| a.binary_impl::<candle_core::op::Add>(b, l, m), Ok)?;
        Ok((sum, l.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        l: &Layout,
        b: &CudaStorage,
        m: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Ok((a.binary_impl::<candle_core::op::Add>(b, l, m)?, l.shape().clone()))
    }

    fn metal_fwd(
        &self,
        a: &MetalStorage,
        l: &Layout,
        b: &MetalStorage,
        m: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        Ok((a.binary_impl::<candle_core::op::Add>(b, l, m)?, l.shape().clone()))
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of = |x: &Tensor| x.track_op().then(|| gradient.clone());
        Ok((of(a), of(b)))
    }
}

/// `x` times a number, as an operation known to [`backward`](crate::tape::backward): for example a weighted loss.
///
/// # Errors
/// A dtype that is not of real numbers.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let x = Var::new(3f32, &Device::Cpu)?;
/// let half = ops::tape::scale(&x, 0.5)?;
/// assert_eq!(half.to_scalar::<f32>()?, 1.5);
/// assert_eq!(ops::tape::backward(&half)?.get(&x).unwrap().to_scalar::<f32>()?, 0.5);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    match x.track_op() && x.dtype().is_float() {
        true => apply_op1(x, Scale(factor)),
        false => x * factor,
    }
}

struct Scale(f64);

impl CustomOp1 for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((x.affine(layout, self.0, 0.0)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((x.affine(layout, self.0, 0.0)?, layout.shape().clone()))
    }

    fn metal_fwd(&self, x: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        Ok((x.affine(layout, self.0, 0.0)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        (gradient * self.0).map(Some)
    }
}
