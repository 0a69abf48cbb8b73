//! Ranks that add up a tensor: `cargo run -p girandole-launch --example all_reduce`, or under `girandole launch`, `torchrun --no-python`,
//! `srun` or `mpirun`.
#![allow(clippy::print_stdout, reason = "that is what it is for")]

use std::process::ExitCode;

use candle_core::{Device, Tensor};
use comm::{Communicator, ReduceOp, Result};
use launch::RankContext;

fn train(rank: RankContext) -> Result<()> {
    let comm = rank.connect()?;
    let tensor = Tensor::new(&[comm.rank() as f32], &Device::Cpu)?;
    comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
    println!("rank {} of {}: {:?}", comm.rank(), comm.world_size(), tensor.to_vec1::<f32>()?);
    Ok(())
}

fn main() -> ExitCode {
    launch::run(2, train)
}
