//! The handbook's operations, with the values of each rank before and after.

use candle_core::{DType, Tensor};
use cli::prelude::*;
use comm::ReduceOp;

use super::stage::{OrderedOutput, numbers};

/// Returns the initial tensor: `[r + 1, 10 (r + 1)]` on rank r.
fn own(stage: &OrderedOutput<'_>) -> Result<Tensor> {
    let number = stage.comm.rank() as f32 + 1.0;
    Ok(Tensor::new(&[number, 10.0 * number], stage.device)?)
}

pub(super) fn show(stage: &OrderedOutput<'_>) -> Result<()> {
    let comm = stage.comm;
    in_place(stage, "all_reduce (sum)", |tensor| Ok(comm.all_reduce(tensor, ReduceOp::Sum)?.wait()?))?;
    send_and_recv(stage)?;
    in_place(stage, "reduce (sum, to rank 0)", |tensor| {
        Ok(comm.reduce(tensor, ReduceOp::Sum, 0)?.wait()?)
    })?;
    let last = comm.world_size() - 1;
    in_place(stage, &format!("broadcast (from rank {last})"), |tensor| {
        Ok(comm.broadcast(tensor, last)?.wait()?)
    })?;
    all_gather(stage)
}

/// Shows an operation that changes its tensor in place.
fn in_place(stage: &OrderedOutput<'_>, title: &str, operation: impl Fn(&Tensor) -> Result<()>) -> Result<()> {
    stage.title(title)?;
    let tensor = own(stage)?;
    let before = numbers(&tensor)?;
    operation(&tensor)?;
    stage.each(format_args!("before {before}, after {}", numbers(&tensor)?))
}

/// Each rank sends to the next one, the last one to rank 0.
fn send_and_recv(stage: &OrderedOutput<'_>) -> Result<()> {
    let comm = stage.comm;
    let (rank, world_size) = (comm.rank(), comm.world_size());
    stage.title("send, recv")?;
    if world_size == 1 {
        return stage.each("there is nobody to send to");
    }
    let (to, from) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let (sent, received) = (own(stage)?, Tensor::zeros(2, DType::F32, stage.device)?);
    // Rank 0 sends first: if all ranks sent first, each would block until the next one receives.
    if rank == 0 {
        comm.send(&sent, to)?.wait()?;
        comm.recv(&received, from)?.wait()?;
    } else {
        comm.recv(&received, from)?.wait()?;
        comm.send(&sent, to)?.wait()?;
    }
    let (sent, received) = (numbers(&sent)?, numbers(&received)?);
    stage.each(format_args!("before {sent}, sent to rank {to}; after {received}, received from rank {from}"))
}

fn all_gather(stage: &OrderedOutput<'_>) -> Result<()> {
    stage.title("all_gather")?;
    let input = own(stage)?;
    let output = Tensor::zeros((stage.comm.world_size(), 2), DType::F32, stage.device)?;
    stage.comm.all_gather(&output, &input)?.wait()?;
    stage.each(format_args!("before {}, after {}", numbers(&input)?, numbers(&output)?))
}
