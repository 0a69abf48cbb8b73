//! Mean squared error, as one operation.

use candle_core::backend::BackendStorage;
use candle_core::op::{ReduceOp, Sqr, Sub};
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor};

use crate::tape;

/// The mean of `(output - target)^2` over all elements, equal to the bit to `candle_nn::loss::mse`. As an operation that
/// [`backward`](crate::backward) knows it does not make candle run backward through the whole model.
///
/// # Shapes
/// Output and target have the same shape; the loss has no dimensions.
///
/// # Cost
/// A few passes over the output; nothing is kept for backward.
///
/// # Errors
/// Shapes, dtypes or devices that differ; a dtype that is not of real numbers.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let output = Var::new(&[1f32, 2., 3., 4.], &Device::Cpu)?;
/// let loss = ops::mse(&output, &Tensor::new(&[1f32, 2., 3., 8.], &Device::Cpu)?)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 4.0);
/// assert_eq!(loss.backward()?.get(&output).unwrap().to_vec1::<f32>()?, [0.0, 0.0, 0.0, -2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn mse(output: &Tensor, target: &Tensor) -> Result<Tensor> {
    // candle's own subtraction reports what does not fit.
    let fits = output.shape() == target.shape() && output.dtype() == target.dtype();
    if !fits || !output.device().same_device(target.device()) || !output.dtype().is_float() {
        return candle_nn::loss::mse(output, target);
    }
    tape::apply_op2(output, target, Mse)
}

struct Mse;

fn forward<S: BackendStorage>(a: &S, l: &Layout, b: &S, m: &Layout) -> Result<(S, Shape)> {
    let (dense, count) = (Layout::contiguous(l.shape()), l.shape().elem_count());
    let squares = a.binary_impl::<Sub>(b, l, m)?.unary_impl::<Sqr>(&dense)?;
    let all: Vec<usize> = (0..l.dims().len()).collect();
    let sum = squares.reduce_op(ReduceOp::Sum, &dense, &all)?;
    let mean = sum.affine(&Layout::contiguous(()), 1.0 / count as f64, 0.0)?;
    Ok((mean, Shape::from(())))
}

impl CustomOp2 for Mse {
    fn name(&self) -> &'static str {
        "mse"
    }

    fn cpu_fwd(&self, a: &CpuStorage, l: &Layout, b: &CpuStorage, m: &Layout) -> Result<(CpuStorage, Shape)> {
        forward(a, l, b, m)
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        l: &Layout,
        b: &CudaStorage,
        m: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        forward(a, l, b, m)
    }

    fn metal_fwd(
        &self,
        a: &MetalStorage,
        l: &Layout,
        b: &MetalStorage,
        m: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        forward(a, l, b, m)
    }

    fn bwd(
        &self,
        output: &Tensor,
        target: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let share = gradient.affine(1.0 / output.elem_count() as f64, 0.0)?;
        let difference = (output.detach() - target.detach())?;
        let of_output = difference.broadcast_mul(&share)?.affine(2.0, 0.0)?;
        let of_target = target.track_op().then(|| of_output.neg()).transpose()?;
        Ok((Some(of_output), of_target))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, TensorId, Var};

    use super::*;

    /// Loss and gradients have the bits of candle's, also for views and a weighted loss, and no gradient goes to the target
    /// unless it is part of a graph.
    #[test]
    fn it_is_candles_to_the_bit() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let random =
                || Var::from_tensor(&Tensor::randn(0f32, 2., (70, 33), &Device::Cpu)?.to_dtype(dtype)?);
            let (x, y) = (random()?, random()?);
            let bits = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
            for target in [y.t()?, y.detach().t()?] {
                let losses =
                    [mse(&x.t()?, &target)?, candle_nn::loss::mse(&x.t()?, &target)?].map(|x| x * 3.0);
                let [ours, candles] = losses;
                let (ours, candles) = (ours?, candles?);
                assert_eq!(bits(&ours)?, bits(&candles)?, "{dtype:?}");
                let (ours, candles) = (crate::backward(&ours)?, candles.backward()?);
                for var in [&x, &y] {
                    let both = [&ours, &candles].map(|grads| grads.get(var).map(bits).transpose());
                    let [ours, candles] = both;
                    assert_eq!(ours?, candles?, "{dtype:?}");
                }
            }
        }
        let (x, y) = (Tensor::new(&[1f32, 2.], &Device::Cpu)?, Tensor::new(1f32, &Device::Cpu)?);
        assert!(mse(&x, &y).is_err() && mse(&x, &x.to_dtype(DType::F64)?).is_err());
        Ok(())
    }

    /// The whole graph is one that the tape knows: nothing of it is left to candle.
    #[test]
    fn the_model_below_keeps_its_own_backward() -> Result<()> {
        let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
        let loss = mse(&tape::scale(&x, 2.0)?, &Tensor::new(&[0f32, 0.], &Device::Cpu)?)?;
        let grads = crate::backward(&loss)?;
        let ids: Vec<TensorId> = grads.get_ids().copied().collect();
        // candle's backward would keep a gradient of the target, too.
        assert_eq!(ids, [x.id()]);
        assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [4.0, 8.0]);
        Ok(())
    }
}
