//! The loss of a language model on a text, over ranks: `cargo run --release -p girandole --example evaluate -- MODEL-FOLDER TEXT-FILE`
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use girandole::comm::Communicator;
use girandole::launch::{self, RankContext};
use girandole::models::{CausalLm, Tokenizer, Weights};
use girandole::{Layout, Parallel, ParallelConfig};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const LENGTH: usize = 16;

fn evaluate(rank: RankContext) -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (folder, text) =
        arguments.next().zip(arguments.next()).ok_or("give the model's folder and a text file")?;
    let (weights, tokenizer) = (Weights::folder(folder.as_ref())?, Tokenizer::from_folder(folder.as_ref())?);
    let tokens = tokenizer.encode(&std::fs::read_to_string(text)?)?;
    let (comm, layout) = (Arc::new(rank.connect()?), "dp=2".parse::<Layout>()?);
    let (rank, config) = (comm.rank(), weights.config().clone());
    let build = move |builder: &_| CausalLm::new(&config, builder);
    let mut model = Parallel::new(comm, &layout, weights.parts(), &ParallelConfig::default(), build)?;
    let (mut loss, mut targets) = (0.0, 0);
    // All ranks take part in each call, each with its own row. Rows at the end that are too few for all ranks are left out.
    let rows: Vec<&[u32]> = tokens.windows(LENGTH + 1).step_by(LENGTH).collect();
    for rows in rows.chunks_exact(layout.data_ranks()) {
        let row = Tensor::new(rows[rank], &Device::Cpu)?.unsqueeze(0)?;
        let part = model.evaluate(&row.narrow(1, 0, LENGTH)?, &row.narrow(1, 1, LENGTH)?)?;
        loss += part.loss * part.targets as f64;
        targets += part.targets;
    }
    if rank == 0 {
        let mean = loss / targets as f64;
        println!("{targets} tokens: loss {mean:.4}, perplexity {:.2}", mean.exp());
    }
    Ok(())
}

fn main() -> ExitCode {
    launch::run(2, evaluate)
}
