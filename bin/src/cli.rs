//! The command line.

use std::io::Write;
use std::process::ExitCode;

use ::launch::worker_guard;
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::comm_bench::{self, CommBenchOptions};
use crate::error::Result;
use crate::experiment;
use crate::experiments::cifar10::Cifar10Options;
use crate::experiments::ddp_linear::DdpLinearOptions;
use crate::experiments::ddp_mlp::DdpMlpOptions;
use crate::experiments::ddp_trainer::DdpTrainerOptions;
use crate::experiments::ddp_transformer::DdpTransformerOptions;
use crate::experiments::fsdp_mlp::FsdpMlpOptions;
use crate::experiments::pipeline_transformer::PipelineTransformerOptions;
use crate::experiments::process_groups::{self, ProcessGroupsOptions};
use crate::experiments::sampler::SamplerOptions;
use crate::experiments::tensor_parallel::{self, TensorParallelMlpOptions, TensorParallelTransformerOptions};
use crate::interrupt;
use crate::language::{self, FinetuneOptions, PretrainOptions};
use crate::launch::{self, LaunchOptions};
use crate::plan::{self, PlanOptions};
use crate::recipe;
use crate::text::{EvaluateOptions, GenerateOptions, TokenizeOptions};

// The feature that it is named for in Cargo.toml gives candle's matrix products AVX-512.
use gemm as _;

/// Distributed training for candle: experiments that run on one machine or many.
#[derive(Debug, Parser)]
#[command(name = "girandole", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// One process against data-parallel ranks on y = 2x + 3 + noise
    DdpLinear(DdpLinearOptions),
    /// A Trainer on every rank, which says how much it has to do
    DdpTrainer(DdpTrainerOptions),
    /// A Transformer that learns to predict the next token, on data-parallel ranks
    DdpTransformer(DdpTransformerOptions),
    /// A small classifier on data-parallel ranks, validated over all of them
    DdpMlp(DdpMlpOptions),
    /// A model of which each rank keeps a part, gathered layer by layer
    FsdpMlp(FsdpMlpOptions),
    /// A convolutional net that tells pictures apart: trained, saved, tested
    Cifar10(Cifar10Options),
    /// Two layers with a GELU between them, each divided over the ranks
    TensorParallelMlp(TensorParallelMlpOptions),
    /// A language model whose attention heads, feed-forward layers and vocabulary are divided over the ranks
    TensorParallelTransformer(TensorParallelTransformerOptions),
    /// A Transformer cut into stages, micro-batches flowing through
    PipelineTransformer(PipelineTransformerOptions),
    /// Which rank gets which samples, with a plain and with a distributed sampler
    Sampler(SamplerOptions),
    /// Back ends, ranks, meeting places, operations between ranks, groups of ranks
    ProcessGroups(ProcessGroupsOptions),
    /// A language model from random weights, on your text, in any layout
    Pretrain(PretrainOptions),
    /// A model of a Hugging Face folder on your text, whole or by adapters (LoRA), in any layout
    Finetune(FinetuneOptions),
    /// Text that a model of a Hugging Face folder writes
    Generate(GenerateOptions),
    /// How well a model of a Hugging Face folder predicts a text: loss and perplexity
    Evaluate(EvaluateOptions),
    /// Text, or conversations, to a file of tokens to train on
    Tokenize(TokenizeOptions),
    /// Start any program as ranks on this machine, or on several, as torchrun does
    Launch(LaunchOptions),
    /// How long collectives take, by size
    CommBench(CommBenchOptions),
    /// Which way to spread a model over ranks fits, what it costs, and which to take
    Plan(PlanOptions),
}

impl Command {
    fn run(&self) -> Result<()> {
        match self {
            Command::DdpLinear(options) => experiment::run(options),
            Command::DdpTrainer(options) => experiment::run(options),
            Command::DdpTransformer(options) => experiment::run(options),
            Command::DdpMlp(options) => experiment::run(options),
            Command::FsdpMlp(options) => experiment::run(options),
            Command::Cifar10(options) => experiment::run(options),
            Command::TensorParallelMlp(options) => tensor_parallel::run(options),
            Command::TensorParallelTransformer(options) => tensor_parallel::run(options),
            Command::PipelineTransformer(options) => options.run(),
            Command::Sampler(options) => options.run(),
            Command::ProcessGroups(options) => process_groups::run(options),
            Command::Pretrain(options) => language::run(options),
            Command::Finetune(options) => language::run(options),
            Command::Generate(options) => options.run(),
            Command::Evaluate(options) => options.run(),
            Command::Tokenize(options) => options.run(),
            Command::Launch(options) => launch::run(options),
            Command::CommBench(options) => comm_bench::run(options),
            Command::Plan(options) => plan::run(options),
        }
    }
}

/// The command line as it was typed: with underscores in options' names, too, as PyTorch's programs have them, and with the options of
/// `--recipe`.
///
/// # Errors
/// A recipe that cannot be used. Where the command line cannot, this ends the process.
fn parse() -> Result<Cli> {
    let alias = |option: Arg| match option.get_long().map(|long| long.replace('-', "_")) {
        Some(name) if Some(&*name) != option.get_long() => {
            let is_known = option.get_all_aliases().is_some_and(|known| known.contains(&&*name));
            // A few names, once in a process.
            if is_known { option } else { option.alias(&*name.leak()) }
        }
        _ => option,
    };
    let commands = Cli::command().mut_subcommands(|command| {
        // What `launch` takes after a program's name is that program's.
        let command = if command.get_name() == "launch" { command } else { recipe::with_option(command) };
        command.mut_args(alias)
    });
    let arguments = recipe::expand(&commands, std::env::args_os().collect())?;
    let parsed = commands.try_get_matches_from(arguments).and_then(|found| Cli::from_arg_matches(&found));
    parsed.map_err(|error| recipe::own(&error).unwrap_or_else(|| error.exit()))
}

/// What comes before anything else in every process.
fn begin() -> Result<()> {
    worker_guard()?;
    interrupt::tell()
}

/// Runs the program: parses, runs the command, and says in one line what went wrong.
pub fn main() -> ExitCode {
    let result = begin().and_then(|()| parse()?.command.run());
    let Err(error) = result else { return ExitCode::SUCCESS };
    if let Some(message) = error.message() {
        // Where nobody reads it, the exit code has to do.
        let _ = writeln!(std::io::stderr().lock(), "{message}");
    }
    ExitCode::from(error.exit_code())
}
