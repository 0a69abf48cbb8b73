//! The program of the README, on two ranks: `cargo run -p bin --example own_program`.
#![allow(clippy::print_stdout, reason = "that is what it is for")]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
use comm::Communicator;
use ddp::{Ddp, DdpConfig};
use launch::RankContext;

fn train(rank: RankContext) -> Result<()> {
    let comm = Arc::new(rank.connect()?);
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let ddp = Ddp::new(comm.clone(), builder, &DdpConfig::default(), |builder| linear(1, 1, builder))?;
    let mut optimizer = SGD::new(ddp.vars(), 0.05)?;
    let first = comm.rank() as f32; // each rank has samples of its own
    let x = Tensor::new(&[[first], [first + 2.0]], &Device::Cpu)?;
    let y = ((&x * 2.0)? + 3.0)?;
    for step in 1..=300 {
        let loss = loss::mse(&ddp.forward(&x)?, &y)?;
        optimizer.step(&ddp.backward(&loss)?)?; // the gradients are averaged over all ranks
        if step % 100 == 0 {
            println!("rank {}: step {step}, loss {:.6}", comm.rank(), loss.to_scalar::<f32>()?);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    launch::run(2, train)
}
