//! A collective of your own, made of messages: the sum over this rank and all lower ranks (a prefix sum), in log2(ranks) rounds.
//! `cargo run --release -p girandole --example own_collective -- 4`
#![allow(clippy::print_stdout)]

use std::process::ExitCode;

use candle_core::{DType, Device, Tensor};
use girandole::comm::{Communicator, Message, Result};
use girandole::launch::{self, RankContext};

/// The sum of the tensors of this rank and all lower ranks. Call it on every rank, with tensors of the same shape.
fn prefix_sum(comm: &dyn Communicator, tensor: &Tensor) -> Result<Tensor> {
    let (rank, mut sum) = (comm.rank(), tensor.copy()?);
    let mut distance = 1;
    while distance < comm.world_size() {
        let lower = Tensor::zeros(tensor.shape(), tensor.dtype(), tensor.device())?;
        let mut messages = Vec::new();
        if rank + distance < comm.world_size() {
            messages.push(Message::Send { tensor: sum.clone(), to: rank + distance });
        }
        if rank >= distance {
            messages.push(Message::Recv { tensor: lower.clone(), from: rank - distance });
        }
        if !messages.is_empty() {
            // Sent and received at once, so ranks cannot wait for each other in a circle.
            comm.batch(messages)?.wait()?;
        }
        sum = (sum + lower)?;
        distance *= 2;
    }
    Ok(sum)
}

fn show(rank: RankContext) -> Result<()> {
    let comm = rank.connect()?;
    let mine = Tensor::full(comm.rank() as f32 + 1.0, 2, &Device::Cpu)?.to_dtype(DType::F32)?;
    println!("rank {}: {:?}", comm.rank(), prefix_sum(&comm, &mine)?.to_vec1::<f32>()?);
    Ok(())
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(4);
    launch::run(ranks, show)
}
