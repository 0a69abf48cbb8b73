//! Where backward begins: at a stage's output, with the gradient that the next stage gave.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor};

/// A number whose backward gives `output` this gradient, without a computation.
pub(crate) fn seeded(output: &Tensor, gradient: Tensor) -> Result<Tensor> {
    if output.device().is_cpu() && matches!(output.dtype(), DType::F32 | DType::F64) {
        return output.apply_op1(Seed(gradient));
    }
    (output * gradient.detach())?.sum_all()
}

struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "pipeline-seed"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let zero = match storage {
            CpuStorage::F64(_) => CpuStorage::F64(vec![0.0]),
            _ => CpuStorage::F32(vec![0.0]),
        };
        Ok((zero, Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// The gradient of a micro-batch's loss: its share of the batch's mean.
pub(crate) fn share(loss: &Tensor, micro_batches: usize) -> Result<Tensor> {
    Tensor::new(1.0 / micro_batches as f64, loss.device())?.to_dtype(loss.dtype())?.reshape(loss.shape())
}
