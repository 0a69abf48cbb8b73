//! Collectives behind the differentiable functions. All results are new tensors, contiguous and the whole of their
//! storage.

use candle_core::Tensor;

use crate::{Communicator, Error, Operation, ReduceOp, Result};

/// Returns a contiguous copy, detached from the graph.
pub(super) fn detached_copy(x: &Tensor) -> Result<Tensor> {
    Ok(x.detach().force_contiguous()?)
}

pub(super) fn sum(x: &Tensor, comm: &dyn Communicator) -> Result<Tensor> {
    let tensor = detached_copy(x)?;
    comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
    Ok(tensor)
}

pub(super) fn own_part(x: &Tensor, dim: usize, comm: &dyn Communicator) -> Result<Tensor> {
    let len = part_len(x, dim, comm)?;
    detached_copy(&x.narrow(dim, comm.rank() * len, len)?)
}

pub(super) fn gather(x: &Tensor, dim: usize, comm: &dyn Communicator) -> Result<Tensor> {
    let input = move_dim_to_front(x, dim)?;
    let output = zeros(&input, input.dim(0)? * comm.world_size())?;
    comm.run(Operation::AllGather { output: output.clone(), input, counts: None })?;
    move_dim_back(output, dim)
}

pub(super) fn sum_part(x: &Tensor, dim: usize, comm: &dyn Communicator) -> Result<Tensor> {
    let len = part_len(x, dim, comm)?;
    let input = move_dim_to_front(x, dim)?;
    let output = zeros(&input, len)?;
    let op = ReduceOp::Sum;
    comm.run(Operation::ReduceScatter { output: output.clone(), input, op, counts: None })?;
    move_dim_back(output, dim)
}

pub(super) fn exchange(
    x: &Tensor,
    split_dim: usize,
    concat_dim: usize,
    comm: &dyn Communicator,
) -> Result<Tensor> {
    let len = part_len(x, split_dim, comm)?;
    // An axis that does not exist must be an error before any communication.
    x.dim(concat_dim)?;
    let input = move_dim_to_front(x, split_dim)?;
    let output = zeros(&input, input.dim(0)?)?;
    let (output_counts, input_counts) = (None, None);
    comm.run(Operation::AllToAll { output: output.clone(), input, output_counts, input_counts })?;
    let part = |rank: usize| output.narrow(0, rank * len, len)?.transpose(0, split_dim);
    let parts = (0..comm.world_size()).map(part).collect::<candle_core::Result<Vec<_>>>()?;
    detached_copy(&Tensor::cat(&parts, concat_dim)?)
}

fn part_len(x: &Tensor, dim: usize, comm: &dyn Communicator) -> Result<usize> {
    let (len, parts) = (x.dim(dim)?, comm.world_size());
    if !len.is_multiple_of(parts) {
        let got = format!("a tensor of shape {:?}, to be divided along dim {dim}", x.dims());
        return Err(Error::invalid(
            "a split",
            got,
            format!("its length must be a multiple of {parts} ranks"),
        ));
    }
    Ok(len / parts)
}

/// Moves `dim` to the front, so that its parts are contiguous.
fn move_dim_to_front(x: &Tensor, dim: usize) -> Result<Tensor> {
    Ok(x.detach().transpose(0, dim)?.contiguous()?)
}

/// Moves the first dim back to its position `dim`.
fn move_dim_back(x: Tensor, dim: usize) -> Result<Tensor> {
    if dim == 0 { Ok(x) } else { detached_copy(&x.transpose(0, dim)?) }
}

fn zeros(like: &Tensor, first: usize) -> Result<Tensor> {
    let mut dims = like.dims().to_vec();
    dims[0] = first;
    Ok(Tensor::zeros(dims, like.dtype(), like.device())?)
}
