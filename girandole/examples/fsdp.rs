//! FSDP: each rank keeps a part of all parameters, gradients and optimizer state. `cargo run --release -p girandole --example fsdp -- 2`
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, Optimizer, linear, loss};
use girandole::DistributedModel;
use girandole::comm::Communicator;
use girandole::fsdp::{Fsdp, FsdpConfig, Unit, UnitBuilder};
use girandole::launch::{self, RankContext};
use girandole::sampler::{Generator, SharedGenerator};
use girandole::training::{Adam, AdamConfig, TorchInit};

const WIDTH: usize = 64;

/// Layers, each a unit: its parameters are whole only while it computes.
struct Net(Vec<Unit<Linear>>);

impl Net {
    fn new(units: UnitBuilder) -> Result<Self> {
        let layer = |index: usize| units.pp(index).unit(|builder| linear(WIDTH, WIDTH, builder));
        Ok(Self((0..8).map(layer).collect::<Result<_>>()?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| &x + layer.forward(&x)?.tanh()?)
    }
}

fn train(rank: RankContext) -> Result<()> {
    let comm: Arc<dyn Communicator> = Arc::new(rank.connect()?);
    let generator = SharedGenerator::from(Generator::new(42));
    let builder = TorchInit::tensor_builder(&generator, DType::F32, &Device::Cpu);
    let fsdp = Fsdp::new(comm.clone(), builder, &FsdpConfig::default(), Net::new)?;
    let mut optimizer = Adam::named(fsdp.named_vars(), AdamConfig::default())?;
    let x = Tensor::randn(0f32, 1.0, (8, WIDTH), &Device::Cpu)?; // this rank's rows
    for step in 0..=50 {
        let loss = loss::mse(&fsdp.forward(&x)?, &x.cos()?)?;
        let mut grads = fsdp.backward(&loss)?; // gradients of this rank's shard, averaged over all ranks
        let norm = fsdp.clip_grad_norm(&mut grads, 1.0)?;
        optimizer.step(&grads)?;
        if step % 25 == 0 && comm.rank() == 0 {
            println!("step {step}: loss {:.6}, norm of the gradients {norm:.4}", loss.to_scalar::<f32>()?);
        }
    }
    let kept: usize = fsdp.shard_ranges().iter().map(ExactSizeIterator::len).sum();
    println!("rank {}: keeps {kept} of {} parameters", comm.rank(), 8 * (WIDTH * WIDTH + WIDTH));
    Ok(())
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    launch::run(ranks, train)
}
