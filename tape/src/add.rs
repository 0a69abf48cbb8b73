//! Addition and scaling that `backward` knows.

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor,
};

use crate::{apply_op1, apply_op2};

/// `a + b` for equal shapes, as an operation known to [`backward`](crate::backward): for example a residual
/// connection. Only tensors that are part of a graph get a gradient.
///
/// # Errors
/// Shapes, dtypes or devices that differ.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let (a, b) = (Var::new(&[1f32, 2.0], &Device::Cpu)?, Var::new(&[3f32, 4.0], &Device::Cpu)?);
/// let sum = tape::add(&a, &b)?;
/// assert_eq!(sum.to_vec1::<f32>()?, [4.0, 6.0]);
/// let grads = tape::backward(&tape::scalar_with_gradient(&sum, Tensor::new(&[5f32, 6.0], &Device::Cpu)?)?)?;
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

struct Add;

impl CustomOp2 for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(&self, a: &CpuStorage, l: &Layout, b: &CpuStorage, m: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((a.binary_impl::<candle_core::op::Add>(b, l, m)?, l.shape().clone()))
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

/// `x` times a number, as an operation known to [`backward`](crate::backward): for example a weighted loss.
///
/// # Errors
/// A dtype that is not of real numbers.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let x = Var::new(3f32, &Device::Cpu)?;
/// let half = tape::scale(&x, 0.5)?;
/// assert_eq!(half.to_scalar::<f32>()?, 1.5);
/// assert_eq!(tape::backward(&half)?.get(&x).unwrap().to_scalar::<f32>()?, 0.5);
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
