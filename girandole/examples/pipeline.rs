//! A pipeline: each rank has some of the layers. `cargo run --release -p girandole --example pipeline -- 2`
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap, linear, loss};
use girandole::comm::Communicator;
use girandole::launch::{self, RankContext};
use girandole::pipeline::{Modules, Pipeline, PipelineConfig, ScheduleKind};
use girandole::sampler::{Generator, SharedGenerator};
use girandole::training::{Adam, AdamConfig, TorchInit};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const WIDTH: usize = 16;

fn train(rank: RankContext) -> Result<()> {
    let comm: Arc<dyn Communicator> = Arc::new(rank.connect()?);
    // The whole model; each rank keeps only the modules of its stage.
    let modules = (0..6).fold(Modules::new(), |modules, layer| {
        let build = |builder: VarBuilder| linear(WIDTH, WIDTH, builder);
        modules.module(&format!("layers.{layer}"), build)
    });
    let config =
        PipelineConfig { schedule: ScheduleKind::OneFOneB, micro_batches: 4, ..PipelineConfig::default() };
    let generator = SharedGenerator::from(Generator::new(42));
    let weights = |map: &VarMap| TorchInit::var_builder(&generator, map, DType::F32, &Device::Cpu);
    let example = Tensor::zeros((2, WIDTH), DType::F32, &Device::Cpu)?; // a micro-batch: 8 rows in 4 parts
    let mut pipeline = Pipeline::new(comm.clone(), &modules, &weights, &example, loss::mse, &config)?;
    let mut optimizer = Adam::named(pipeline.named_vars(), AdamConfig::default())?;
    let x = Tensor::arange(0f32, (8 * WIDTH) as f32, &Device::Cpu)?.sin()?.reshape((8, WIDTH))?;
    let y = x.cos()?;
    for number in 0..=100 {
        let step = pipeline.step(Some(&x), Some(&y))?; // only the first rank needs `x`, only the last one `y`
        optimizer.step(&step.grads)?;
        if let Some(loss) = step.loss.filter(|_| number % 50 == 0) {
            println!("rank {}: step {number}, loss {loss:.6}", comm.rank());
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    launch::run(ranks, train)
}
