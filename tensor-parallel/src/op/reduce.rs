//! The sum of what the ranks have computed, which may be under way while something else is computed.

use candle_core::Tensor;
use comm::{Operation, ReduceOp, Work};

use crate::context::sequence_dim;
use crate::{Context, Result};

/// A sum over ranks that is under way: all of it, or with sequence parallelism this rank's part of the sequence.
#[must_use]
pub(super) struct Reduction {
    work: Work,
    output: Tensor,
    /// To be put back at its place.
    dim: usize,
}

impl Reduction {
    /// Begins to sum `x`, which is contiguous and used nowhere else.
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

    /// Waits for the sum.
    pub(super) fn finish(self) -> Result<Tensor> {
        self.work.wait()?;
        Ok(match self.dim {
            0 => self.output,
            dim => self.output.transpose(0, dim)?.force_contiguous()?,
        })
    }
}
