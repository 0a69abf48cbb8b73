//! Asynchronous sum over the ranks, which overlaps with other computation.

use candle_core::Tensor;
use comm::{Operation, ReduceOp, Work};

use crate::context::sequence_dim;
use crate::{Context, Result};

/// A sum over ranks in progress: an all-reduce or, with sequence parallelism, a reduce-scatter along the sequence.
#[must_use]
pub(super) struct Reduction {
    work: Work,
    output: Tensor,
    /// Dimension that was moved to the front for the reduce-scatter.
    dim: usize,
}

impl Reduction {
    /// Starts to sum `x`, which must be contiguous and not used elsewhere.
    pub(super) fn start(x: Tensor, context: &Context) -> Result<Self> {
        let comm = context.comm();
        if !context.sequence_parallel() {
            let work = comm.all_reduce(&x, ReduceOp::Sum)?;
            return Ok(Self { work, output: x, dim: 0 });
        }
        let dim = sequence_dim(x.dims())?;
        let input = x.transpose(0, dim)?.contiguous()?;
        let mut dims = input.dims().to_vec();
        dims[0] /= comm.world_size();
        let output = Tensor::zeros(dims, input.dtype(), input.device())?;
        let (op, counts) = (ReduceOp::Sum, None);
        let work = comm.submit(Operation::ReduceScatter { output: output.clone(), input, op, counts })?;
        Ok(Self { work, output, dim })
    }

    /// Waits for the sum, and returns it.
    pub(super) fn finish(self) -> Result<Tensor> {
        self.work.wait()?;
        Ok(match self.dim {
            0 => self.output,
            dim => self.output.transpose(0, dim)?.force_contiguous()?,
        })
    }
}
