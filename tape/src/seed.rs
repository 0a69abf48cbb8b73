//! Backward from an intermediate tensor with a given gradient.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

use crate::{apply_op1, explicit_op1};

/// Returns a scalar whose backward starts at `output` with `gradient`: for a model whose backward runs in several
/// parts, such as pipeline stages.
///
/// # Shapes
/// `output` and `gradient` have the same shape; the result has no dimensions, and its value is meaningless.
///
/// # Cost
/// None for f32 and f64 on a CPU; otherwise a product of the gradient and a number, and a sum if `output` is a variable.
///
/// # Errors
/// candle's.
///
/// ```
/// use candle_core::{Device, Var};
/// use tape::scalar_with_gradient;
///
/// let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let gradient = candle_core::Tensor::new(&[10f32, 100.0], &Device::Cpu)?;
/// let grads = scalar_with_gradient(&x.sqr()?, gradient)?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [20.0, 400.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn scalar_with_gradient(output: &Tensor, gradient: Tensor) -> Result<Tensor> {
    // Not for a variable: its gradient must have its own storage.
    if !output.is_variable() && output.device().is_cpu() && matches!(output.dtype(), DType::F32 | DType::F64)
    {
        return apply_op1(output, Seed(gradient));
    }
    if !output.is_variable() && output.dtype().is_float() && output.shape() == gradient.shape() {
        let nothing = Tensor::zeros((), output.dtype(), output.device())?;
        // Not read: the host would wait for the device.
        return explicit_op1("seed", [output], nothing, move |_, upstream| {
            Ok([Some(gradient.broadcast_mul(&upstream.detach())?)])
        });
    }
    (output * gradient.detach())?.sum_all()
}

struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let zero = match storage {
            CpuStorage::F64(_) => CpuStorage::F64(vec![0.0]),
            _ => CpuStorage::F32(vec![0.0]),
        };
        Ok((zero, Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, upstream: &Tensor) -> Result<Option<Tensor>> {
        // 1 where the scalar itself is the loss.
        let upstream = upstream.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        if upstream == 1.0 { Ok(Some(self.0.clone())) } else { (&self.0 * upstream).map(Some) }
    }
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
