//! Text from a language model: `cargo run --release -p girandole --example generate -- MODEL-FOLDER "Once upon a time"`
#![allow(clippy::print_stdout)]

use std::io::{Write, stdout};
use std::ops::ControlFlow;
use std::process::ExitCode;

use candle_core::{DType, Device};
use girandole::models::{CausalLm, GenerateConfig, Tokenizer, Weights, generate};
use girandole::training::build::Builder;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn run() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (folder, prompt) = arguments
        .next()
        .zip(arguments.next())
        .ok_or("give the model's folder and the beginning of a text")?;
    let (weights, tokenizer) = (Weights::folder(folder.as_ref())?, Tokenizer::from_folder(folder.as_ref())?);
    let model = CausalLm::new(weights.config(), &Builder::new(weights.tensors(DType::F32, &Device::Cpu)))?;
    let config = GenerateConfig {
        max_new_tokens: 32,
        temperature: 0.8,
        top_p: Some(0.95),
        stop: tokenizer.end_of_text().into_iter().collect(),
        ..GenerateConfig::default()
    };
    // A token may be a part of a character: the stream returns whole characters.
    let (mut text, mut problem) = (tokenizer.stream(), None);
    print!("{prompt}");
    generate(&model, &tokenizer.encode(&prompt)?, &config, |token| match text.push(token) {
        Ok(piece) => {
            print!("{}", piece.unwrap_or_default());
            let _ = stdout().flush();
            ControlFlow::Continue(())
        }
        Err(error) => {
            problem = Some(error);
            ControlFlow::Break(())
        }
    })?;
    println!("{}", text.rest()?);
    problem.map_or(Ok(()), |error| Err(error.into()))
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
