//! A model of your own that trains in every layout: `cargo run --release -p girandole --example own_model -- pp=2,shard=2`.

mod common;

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{Device, Module, Result, Tensor};
use candle_nn::loss;
use girandole::launch::RankContext;
use girandole::training::build::{Builder, Division, Linear, LinearConfig, Model, Unit, Units};
use girandole::training::{Adam, AdamConfig};
use girandole::{InitialWeights, Layout, Parallel, ParallelConfig};

/// A block: two layers, whose result is added to the input.
struct Block(Linear, Linear);

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.1.forward(&self.0.forward(x)?.gelu()?)?
    }
}

struct Net(Vec<Unit<Block>>);

impl Net {
    fn new(builder: &Builder) -> Result<Self> {
        // One layer is divided by its outputs, and the next by its inputs.
        let up = LinearConfig::new(16, 64, Division::Outputs).with_bias(true);
        let down = LinearConfig::new(64, 16, Division::Inputs).with_bias(true);
        let block = |name: &str| {
            builder.unit(name, |part| {
                Ok(Block(part.pp(name).pp("up").linear(&up)?, part.pp(name).pp("down").linear(&down)?))
            })
        };
        Ok(Self(["a", "b", "c", "d"].into_iter().map(block).collect::<Result<_>>()?))
    }
}

impl Units for Net {
    fn units(&self) -> Vec<&dyn Module> {
        self.0.iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl Model for Net {
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        loss::mse(output, targets)
    }
}

fn train(context: RankContext, layout: &Layout) -> girandole::Result<()> {
    let rows = Tensor::arange(0f32, 768.0, &Device::Cpu)?.affine(0.1, 0.0)?.sin()?.reshape((48, 16))?;
    let rows = rows.chunk(layout.data_ranks(), 0)?;
    let (comm, config) = (Arc::new(context.connect()?), ParallelConfig::default());
    let mut model = Parallel::new(comm, layout, InitialWeights::seed(42), &config, Net::new)?;
    let adam = AdamConfig { learning_rate: 0.01, ..AdamConfig::default() };
    let mut optimizer = Adam::named(model.named_vars(), adam)?;
    let x = &rows[model.data_ranks().rank()];
    for number in 0..=100 {
        let step = model.step(x, &x.cos()?)?;
        optimizer.step_scaled(&step.grads, 1.0)?;
        if number % 50 == 0 && model.mesh().world().rank() == 0 {
            eprintln!("step {number}: loss {:.6}", step.loss);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    common::run_in_layout(train)
}
