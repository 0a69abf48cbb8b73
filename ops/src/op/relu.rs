//! ReLU, as one operation.

use candle_core::backend::BackendStorage;
use candle_core::cpu_backend::{Map1, Map2};
use candle_core::op::Relu;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor, WithDType,
};

use super::working_dtype;
use crate::blocks::{map, map_pairs};
use crate::dense::dense_part;
use crate::tape;

const NAME: &str = "relu";

/// `max(x, 0)`. As PyTorch's it has the gradient 0 at 0, and not a number (NaN) stays one; candle's has the gradient 1, and
/// makes NaN 0. As an operation that [`backward`](crate::backward) knows it does not make candle run backward through all
/// layers below.
///
/// # Shapes
/// Any; the result has the same shape.
///
/// # Cost
/// One pass forward and one backward; nothing but the result is kept.
///
/// # Errors
/// A tensor that is not of f16, bf16, f32 or f64.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let x = Var::new(&[-2f32, 0., 3.], &Device::Cpu)?;
/// let y = ops::relu(&x)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0.0, 0.0, 3.0]);
/// assert_eq!(y.backward()?.get(&x).unwrap().to_vec1::<f32>()?, [0.0, 0.0, 1.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn relu(x: &Tensor) -> Result<Tensor> {
    working_dtype(NAME, x.dtype())?;
    tape::apply_op1(&x.contiguous()?, Forward)
}

struct Forward;

impl Map1 for Forward {
    fn f<T: WithDType>(&self, x: &[T], layout: &Layout) -> Result<Vec<T>> {
        let x = dense_part(x, layout)?;
        // Not `x > 0`: that would make NaN 0.
        Ok(map(x, |x| if x <= T::zero() { T::zero() } else { x }))
    }
}

impl CustomOp1 for Forward {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((self.map(x, layout)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((x.unary_impl::<Relu>(layout)?, layout.shape().clone()))
    }

    fn metal_fwd(&self, x: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        Ok((x.unary_impl::<Relu>(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (y, gradient) = (y.detach(), gradient.contiguous()?);
        if y.device().is_cpu() {
            return gradient.apply_op2_no_bwd(&y, &Backward).map(Some);
        }
        (gradient * y.gt(0f64)?.to_dtype(y.dtype())?).map(Some)
    }
}

/// The gradient where the result is not 0.
struct Backward;

impl Map2 for Backward {
    const OP: &'static str = NAME;

    fn f<T: WithDType>(&self, gradient: &[T], l: &Layout, y: &[T], m: &Layout) -> Result<Vec<T>> {
        let (gradient, y) = (dense_part(gradient, l)?, dense_part(y, m)?);
        let passed = |gradient, y| if y <= T::zero() { T::zero() } else { gradient };
        Ok(map_pairs(gradient, y, passed))
    }
}

impl CustomOp2 for Backward {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, a: &CpuStorage, l: &Layout, b: &CpuStorage, m: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((self.map(a, l, b, m)?, l.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    /// Equals candle's at all numbers but 0 and NaN, in each dtype, also for views.
    #[test]
    fn results_and_gradients_equal_candles() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let x = Var::from_tensor(&Tensor::randn(0f32, 2., (300, 170), &Device::Cpu)?.to_dtype(dtype)?)?;
            let outer = Tensor::randn(0f32, 2., (170, 300), &Device::Cpu)?.to_dtype(dtype)?;
            let bits = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            let [ours, candles] = [relu(&x.t()?)?, x.t()?.relu()?];
            assert_eq!(bits(&ours)?, bits(&candles)?, "{dtype:?}");
            let of_x = |y: &Tensor| bits((y * &outer)?.backward()?.get(&x).expect("a gradient"));
            assert_eq!(of_x(&ours)?, of_x(&candles)?, "{dtype:?}");
        }
        assert!(relu(&Tensor::zeros(3, DType::U32, &Device::Cpu)?).is_err());
        Ok(())
    }

    #[test]
    fn what_is_not_a_number_stays_so() -> Result<()> {
        let x = Var::new(&[f32::NAN, -0.0, f32::NEG_INFINITY], &Device::Cpu)?;
        let y = relu(&x)?;
        let numbers = y.to_vec1::<f32>()?;
        assert!(numbers[0].is_nan() && numbers[1..] == [0.0, 0.0] && numbers[1].is_sign_positive());
        assert_eq!(y.backward()?.get(&x).expect("a gradient").to_vec1::<f32>()?, [1.0, 0.0, 0.0]);
        Ok(())
    }
}
