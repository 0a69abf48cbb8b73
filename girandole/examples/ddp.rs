//! Data parallelism: a copy of your model on each rank. `cargo run --release -p girandole --example ddp -- 2`
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, VarMap, linear, loss};
use girandole::comm::Communicator;
use girandole::ddp::{Ddp, DdpConfig};
use girandole::launch::{self, RankContext};
use girandole::training::{Adam, AdamConfig};

/// Any model that is built from a `VarBuilder` will do.
struct Net(Linear, Linear);

impl Net {
    fn new(builder: VarBuilder) -> Result<Self> {
        Ok(Self(linear(1, 32, builder.pp("hidden"))?, linear(32, 1, builder.pp("out"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?)
    }
}

fn train(rank: RankContext) -> Result<()> {
    let comm = Arc::new(rank.connect()?);
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    // All ranks begin with rank 0's weights.
    let ddp = Ddp::new(comm.clone(), builder, &DdpConfig::default(), Net::new)?;
    let mut optimizer =
        Adam::named(ddp.named_vars(), AdamConfig { learning_rate: 0.01, ..AdamConfig::default() })?;
    // Each rank has its own rows: here every `world_size`-th of 64.
    let rows = (comm.rank()..64).step_by(comm.world_size()).map(|row| row as f32 / 16.0 - 2.0);
    let x = Tensor::from_iter(rows, &Device::Cpu)?.unsqueeze(1)?;
    let y = x.sin()?;
    for step in 0..=300 {
        let loss = loss::mse(&ddp.forward(&x)?, &y)?;
        let grads = ddp.backward(&loss)?; // averaged over all ranks while backward still runs
        optimizer.step(&grads)?;
        if step % 100 == 0 && comm.rank() == 0 {
            println!("step {step}: loss {:.6}", loss.to_scalar::<f32>()?);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    launch::run(ranks, train)
}
