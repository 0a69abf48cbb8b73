//! Sigmoid.

use candle_core::{Result, Tensor};

use crate::tape::explicit_op1;

/// `1 / (1 + e^-x)` of each number, as `candle_nn::ops::sigmoid`, but known to [`backward`](crate::tape::backward). On any device.
///
/// # Shapes
/// Any.
///
/// # Cost
/// It keeps nothing beside its argument: backward computes it again.
///
/// # Errors
/// candle's.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[0f64, 3f64.ln()], &Device::Cpu)?;
/// let y = ops::sigmoid(&x)?.to_vec1::<f64>()?;
/// assert!((y[0] - 0.5).abs() < 1e-12 && (y[1] - 0.75).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    explicit_op1("sigmoid", [x], candle_nn::ops::sigmoid(&x.detach())?, |[x], gradient| {
        let y = candle_nn::ops::sigmoid(&x.detach())?;
        let slope = y.ones_like()?.sub(&y)?.mul(&y)?;
        Ok([Some(gradient.detach().mul(&slope)?)])
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;
    use crate::tape;

    /// Result and gradient have the bits of candle's, and nothing is left to its backward.
    #[test]
    fn it_is_candles() -> Result<()> {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let x = Var::from_tensor(&Tensor::randn(0f64, 3., (5, 7), &Device::Cpu)?.to_dtype(dtype)?)?;
            let factor = Tensor::randn(0f64, 1., (7, 5), &Device::Cpu)?.to_dtype(dtype)?;
            let numbers = |x: &Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            let of = |y: Tensor| {
                let loss = tape::scalar_with_gradient(&y, factor.clone())?;
                let grads = tape::backward(&loss)?;
                Ok::<_, candle_core::Error>((numbers(&y)?, numbers(grads.get(&x).expect("a gradient"))?))
            };
            let view = x.t()?;
            assert_eq!(of(sigmoid(&view)?)?, of(candle_nn::ops::sigmoid(&view)?)?, "{dtype:?}");
            assert!(tape::knows(&tape::scalar_with_gradient(&sigmoid(&x)?, factor.t()?.contiguous()?)?));
        }
        Ok(())
    }
}
