//! Girandole's command line, as a library: its commands and the documents' experiments.
//!
//! The program is `girandole`; the benchmarks train the same models through this library. Each command is a clap struct of
//! options, and an experiment is such a struct with the traits [`cli::Command`] and [`cli::Experiment`]:
//! ```
//! use bin::documents::handbook::ddp_mlp::DdpMlpOptions;
//! use cli::Command;
//! assert_eq!((DdpMlpOptions::NAME, DdpMlpOptions::WORLD_SIZE), ("ddp-mlp", 2));
//! assert!(bin::commands().find_subcommand("ddp-mlp").is_some());
//! ```
//!
//! Read it in this order: [`documents::handbook::ddp_mlp`], a small experiment; the other [`documents`].
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "what an experiment prints is its result")]

pub mod documents;
#[cfg(doctest)]
mod guide;

use std::process::ExitCode;

use ::launch::command::LaunchOptions;
use ::plan::command::PlanOptions;
use clap::{Parser, Subcommand};
use cli::comm_bench::{self, CommBenchOptions};
use cli::error::Result;
use cli::language::text::{ChatOptions, EvaluateOptions, ExportOptions, GenerateOptions, TokenizeOptions};
use cli::language::{FinetuneOptions, PreferOptions, PretrainOptions};
use cli::shell::{CompletionsOptions, ManOptions};
use cli::{language, launch, plan, program};

use documents::ddp_tutorial::DdpTransformerOptions;
use documents::from_scratch_tutorial::DdpLinearOptions;
use documents::handbook::cifar10::Cifar10Options;
use documents::handbook::ddp_mlp::DdpMlpOptions;
use documents::handbook::fsdp_mlp::FsdpMlpOptions;
use documents::handbook::process_groups::{self, ProcessGroupsOptions};
use documents::handbook::sampler::SamplerOptions;
use documents::handbook::tensor_parallel::{
    TensorParallelMlpOptions, TensorParallelTransformerOptions, mesh,
};
use documents::pipeline_tutorial::PipelineTransformerOptions;
use documents::trainer_tutorial::DdpTrainerOptions;

// Not called here: the dependency enables the gemm feature named in Cargo.toml, which gives candle AVX-512 matrix
// products.
use gemm as _;

/// Distributed training for candle, on one machine or many.
#[derive(Debug, Parser)]
#[command(name = "girandole", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compare one process with data-parallel ranks on y = 2x + 3 + noise
    DdpLinear(DdpLinearOptions),
    /// Train a linear layer on data-parallel ranks, with a Trainer on each
    DdpTrainer(DdpTrainerOptions),
    /// Train a Transformer on data-parallel ranks
    DdpTransformer(DdpTransformerOptions),
    /// Train and validate a small classifier on data-parallel ranks
    DdpMlp(DdpMlpOptions),
    /// Train a sharded model (FSDP), gathered layer by layer
    FsdpMlp(FsdpMlpOptions),
    /// Train, save and test a convolutional net on pictures
    Cifar10(Cifar10Options),
    /// Train two layers that are divided over ranks
    TensorParallelMlp(TensorParallelMlpOptions),
    /// Train a Transformer whose layers are divided over ranks
    TensorParallelTransformer(TensorParallelTransformerOptions),
    /// Train a Transformer as a pipeline of stages, with micro-batches
    PipelineTransformer(PipelineTransformerOptions),
    /// Show which rank gets which samples
    Sampler(SamplerOptions),
    /// Show backends, rendezvous, collectives and groups at work
    ProcessGroups(ProcessGroupsOptions),
    /// Train a language model from random weights on your text
    Pretrain(PretrainOptions),
    /// Train a Hugging Face model on your text, whole or by adapters
    Finetune(FinetuneOptions),
    /// Train a Hugging Face model on pairs of answers (DPO, ORPO, SimPO)
    Prefer(PreferOptions),
    /// Generate text with a Hugging Face model
    Generate(GenerateOptions),
    /// Converse with a Hugging Face model
    Chat(ChatOptions),
    /// Compute the loss and perplexity of a Hugging Face model on a text
    Evaluate(EvaluateOptions),
    /// Write a Hugging Face model as a GGUF file, or in another type
    Export(ExportOptions),
    /// Convert text or conversations to a file of tokens to train on
    Tokenize(TokenizeOptions),
    /// Start any program as ranks on one machine or several
    Launch(LaunchOptions),
    /// Measure collectives by size
    CommBench(CommBenchOptions),
    /// Show what each layout of a model costs, and which ones fit
    Plan(PlanOptions),
    /// Print a script that completes commands and options in your shell
    Completions(CompletionsOptions),
    /// Write man pages
    Man(ManOptions),
}

impl Command {
    fn run(&self) -> Result<()> {
        match self {
            Command::DdpLinear(options) => cli::run(options),
            Command::DdpTrainer(options) => cli::run(options),
            Command::DdpTransformer(options) => cli::run(options),
            Command::DdpMlp(options) => cli::run(options),
            Command::FsdpMlp(options) => cli::run(options),
            Command::Cifar10(options) => cli::run(options),
            Command::TensorParallelMlp(options) => mesh::run(options),
            Command::TensorParallelTransformer(options) => mesh::run(options),
            Command::PipelineTransformer(options) => options.run(),
            Command::Sampler(options) => options.run(),
            Command::ProcessGroups(options) => process_groups::run(options),
            Command::Pretrain(options) => language::run(options),
            Command::Finetune(options) => language::run(options),
            Command::Prefer(options) => language::run(options),
            Command::Generate(options) => options.run(),
            Command::Chat(options) => options.run(),
            Command::Evaluate(options) => options.run(),
            Command::Export(options) => options.run(),
            Command::Tokenize(options) => options.run(),
            Command::Launch(options) => launch::run(options),
            Command::CommBench(options) => comm_bench::run(options),
            Command::Plan(options) => plan::run(options),
            Command::Completions(options) => options.run(commands()),
            Command::Man(options) => options.run(commands()),
        }
    }
}

/// Returns the program's commands with their options.
pub fn commands() -> clap::Command {
    program::commands::<Cli>()
}

/// Runs the program.
pub fn main() -> ExitCode {
    program::main(|cli: Cli| cli.command.run())
}
