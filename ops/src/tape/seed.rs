//! Backward from an intermediate tensor with a given gradient.

use candle_core::{DType, Result, Tensor};

use crate::tape::explicit_op1;

/// Returns a scalar whose backward starts at `output` with `gradient`: for a model whose backward runs in several
/// parts, such as pipeline stages.
///
/// # Shapes
/// `output` and `gradient` have the same shape; the result has no dimensions, and its value is meaningless.
///
/// # Cost
/// None on a CPU, and on other devices a product of the gradient and a number; if `output` is a variable, a product and a sum.
///
/// # Errors
/// candle's.
///
/// ```
/// use candle_core::{Device, Var};
/// use ops::tape::scalar_with_gradient;
///
/// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let gradient = candle_core::Tensor::new(&[10f32, 100.0], &Device::Cpu)?;
/// let grads = scalar_with_gradient(&x.sqr()?, gradient)?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [20.0, 400.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn scalar_with_gradient(output: &Tensor, gradient: Tensor) -> Result<Tensor> {
    // Not for a variable: its gradient must have its own storage.
    if !output.is_variable() && output.dtype().is_float() && output.shape() == gradient.shape() {
        let nothing = Tensor::zeros((), output.dtype(), output.device())?;
        return explicit_op1("seed", [output], nothing, move |_, upstream| {
            let upstream = upstream.detach();
            // 1 where the scalar itself is the loss. The host would have to wait for the number of another device.
            let is_one =
                upstream.device().is_cpu() && upstream.to_dtype(DType::F64)?.to_scalar::<f64>()? == 1.0;
            Ok([Some(if is_one { gradient.clone() } else { gradient.broadcast_mul(&upstream)? })])
        });
    }
    (output * gradient.detach())?.sum_all()
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn it_may_be_a_part_of_a_loss() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let x = Var::from_tensor(&Tensor::new(&[1f32, 2.0], &Device::Cpu)?.to_dtype(dtype)?)?;
            let gradient = Tensor::new(&[8f32, 16.0], &Device::Cpu)?.to_dtype(dtype)?;
            let loss = (scalar_with_gradient(&(x.as_tensor() * 2.0)?, gradient)? * 0.5)?;
            let found = loss.backward()?.get(&x).unwrap().to_dtype(DType::F32)?;
            assert_eq!(found.to_vec1::<f32>()?, [8.0, 16.0]);
        }
        Ok(())
    }
}
