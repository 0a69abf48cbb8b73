//! Tensor parallelism: each layer is divided over the ranks. `cargo run --release -p girandole --example tensor_parallel -- 2`
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::Optimizer;
use girandole::comm::{Communicator, Mesh};
use girandole::launch::{self, RankContext};
use girandole::tensor_parallel::{
    LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights,
};
use girandole::training::{Adam, AdamConfig};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn train(rank: RankContext) -> Result<()> {
    let comm: Arc<dyn Communicator> = Arc::new(rank.connect()?);
    let (rank, ranks) = (comm.rank(), comm.world_size());
    // One group of all ranks; `[("dp", 2), ("tp", 2)]` would be two copies, each of them over two ranks.
    let mesh = Mesh::new(comm, &[("tp", ranks)])?;
    // Between divided layers each rank has a part of every sequence.
    let config = TensorParallelConfig { sequence_parallel: true, ..TensorParallelConfig::default() };
    let sizes =
        LanguageModelConfig { d_model: 64, num_heads: 4, num_layers: 2, ..LanguageModelConfig::default() };
    let model = |builder| LanguageModel::new(builder, &sizes);
    let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(42), model)?;
    let mut optimizer = Adam::named(parallel.named_vars(), AdamConfig::default())?;
    // The same rows on all ranks of a group.
    let row = Tensor::arange(0u32, 17, &Device::Cpu)?.unsqueeze(0)?.repeat((4, 1))?;
    let (tokens, next) = (row.narrow(1, 0, 16)?, row.narrow(1, 1, 16)?);
    for step in 0..=20 {
        let loss = parallel.model()?.loss(&tokens, &next)?;
        optimizer.step(&parallel.backward(&loss)?)?;
        if step % 10 == 0 && rank == 0 {
            println!("step {step}: loss {:.6}", loss.to_scalar::<f32>()?);
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
    launch::run(ranks, train)
}
