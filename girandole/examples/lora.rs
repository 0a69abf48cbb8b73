//! LoRA: trains small adapters of a frozen language model. `cargo run --release -p girandole --example lora -- MODEL-FOLDER OUT`
//!
//! The folder is one of Hugging Face's (Llama, Mistral, Qwen, GPT-2); `OUT` is what `peft` loads.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::Optimizer;
use girandole::comm::Communicator;
use girandole::launch::{self, RankContext};
use girandole::models::{CausalLm, Lora, LoraConfig, Weights};
use girandole::training::build::Builder;
use girandole::training::{Adam, AdamConfig};
use girandole::{Parallel, ParallelConfig};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn train(rank: RankContext) -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (folder, out) =
        arguments.next().zip(arguments.next()).ok_or("give the model's folder and one for the adapters")?;
    let comm = Arc::new(rank.connect()?);
    let (rank, weights) = (comm.rank(), Weights::folder(folder.as_ref())?);
    let lora = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, weights.config())?;
    let (config, adapters) = (weights.config().clone(), lora.clone());
    // Only the adapters have gradients, are exchanged, and have optimizer state.
    let parallel =
        ParallelConfig { is_trained: Some(Arc::new(Lora::is_adapter)), ..ParallelConfig::default() };
    let build = move |builder: &Builder| CausalLm::new(&config, &adapters.adapt(builder.clone()));
    let mut model = Parallel::new(comm, &"dp=2".parse()?, weights.parts(), &parallel, build)?;
    let mut optimizer =
        Adam::named(model.named_vars(), AdamConfig { learning_rate: 0.02, ..AdamConfig::adamw() })?;
    let row = Tensor::arange(rank as u32, rank as u32 + 9, &Device::Cpu)?.unsqueeze(0)?; // this rank's row of tokens
    for number in 0..=20 {
        let step = model.step(&row.narrow(1, 0, 8)?, &row.narrow(1, 1, 8)?)?;
        optimizer.step(&step.grads)?;
        if number % 10 == 0 && rank == 0 {
            println!("step {number}: loss {:.4}", step.loss);
        }
    }
    Ok(model.save_adapters(out.as_ref(), &lora)?)
}

fn main() -> ExitCode {
    launch::run(2, train)
}
