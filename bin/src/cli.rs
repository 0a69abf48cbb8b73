//! The command line: subcommands, parsing, error output and exit code.

mod help;
mod setup;

use std::io::Write;
use std::process::{ExitCode, exit};

use ::launch::command::LaunchOptions;
use ::launch::worker_guard;
use ::plan::command::PlanOptions;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};
use experiment::error::{Error, Result};
use experiment::{interrupt, mesh};
use language::text::{EvaluateOptions, GenerateOptions, TokenizeOptions};
use language::{FinetuneOptions, PretrainOptions};

use crate::comm_bench::{self, CommBenchOptions};

use crate::experiments::cifar10::Cifar10Options;
use crate::experiments::ddp_linear::DdpLinearOptions;
use crate::experiments::ddp_mlp::DdpMlpOptions;
use crate::experiments::ddp_trainer::DdpTrainerOptions;
use crate::experiments::ddp_transformer::DdpTransformerOptions;
use crate::experiments::fsdp_mlp::FsdpMlpOptions;
use crate::experiments::pipeline_transformer::PipelineTransformerOptions;
use crate::experiments::process_groups::{self, ProcessGroupsOptions};
use crate::experiments::sampler::SamplerOptions;
use crate::experiments::tensor_parallel::{TensorParallelMlpOptions, TensorParallelTransformerOptions};
use crate::launch;
use crate::plan;
use crate::recipe;

use self::setup::{CompletionsOptions, ManOptions};

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
    /// Generate text with a Hugging Face model
    Generate(GenerateOptions),
    /// Compute the loss and perplexity of a Hugging Face model on a text
    Evaluate(EvaluateOptions),
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
            Command::DdpLinear(options) => experiment::run(options),
            Command::DdpTrainer(options) => experiment::run(options),
            Command::DdpTransformer(options) => experiment::run(options),
            Command::DdpMlp(options) => experiment::run(options),
            Command::FsdpMlp(options) => experiment::run(options),
            Command::Cifar10(options) => experiment::run(options),
            Command::TensorParallelMlp(options) => mesh::run(options),
            Command::TensorParallelTransformer(options) => mesh::run(options),
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
            Command::Completions(options) => options.run(commands()),
            Command::Man(options) => options.run(commands()),
        }
    }
}

/// Returns the clap command with all subcommands: option names also accept underscores, as in PyTorch's programs, and
/// `--recipe` is added.
fn commands() -> clap::Command {
    let alias = |option: Arg| match option.get_long().map(|long| long.replace('-', "_")) {
        Some(name) if Some(&*name) != option.get_long() => {
            let is_known = option.get_all_aliases().is_some_and(|known| known.contains(&&*name));
            // Leaked: a few names, once per process.
            if is_known { option } else { option.alias(&*name.leak()) }
        }
        _ => option,
    };
    Cli::command().mut_subcommands(|command| {
        // Arguments after `launch`'s program name belong to that program; `completions` and `man` take no recipe.
        let command = match command.get_name() {
            "launch" | "completions" | "man" => command,
            _ => recipe::with_option(command),
        };
        help::with_pages(command.mut_args(alias))
    })
}

/// Parses this process's arguments, with the options of `--recipe` merged in.
///
/// # Errors
/// A recipe that cannot be used. On an error in the command line itself, the process exits here.
fn parse() -> Result<Cli> {
    let commands = commands();
    let arguments = recipe::expand(&commands, std::env::args_os().collect())?;
    let is_short = arguments.iter().skip(1).take_while(|word| *word != "--").any(|word| word == "-h");
    let commands = if is_short { commands.mut_subcommands(help::short) } else { commands };
    let parsed = commands.try_get_matches_from(arguments).and_then(|found| Cli::from_arg_matches(&found));
    parsed.map_err(|error| recipe::recipe_error(&error).unwrap_or_else(|| print_and_exit(error)))
}

/// Prints the parser's message (an error or the help) and exits the process; returns an error only if printing fails.
fn print_and_exit(mut error: clap::Error) -> Error {
    // clap knows an option under both spellings; only the one with hyphens is documented.
    if let Some(ContextValue::String(name)) = error.get(ContextKind::SuggestedArg) {
        let name = ContextValue::String(name.replace('_', "-"));
        error.insert(ContextKind::SuggestedArg, name);
    }
    match error.print() {
        Ok(()) => exit(error.exit_code()),
        Err(error) => Error::Output(error),
    }
}

/// Setup that every process needs before parsing: the worker guard and signal handlers.
fn init_process() -> Result<()> {
    worker_guard()?;
    interrupt::install_handlers()
}

/// Runs the program: parses the arguments, runs the command, and prints a failure to standard error in one line.
pub fn main() -> ExitCode {
    let result = init_process().and_then(|()| parse()?.command.run());
    let Err(error) = result else { return ExitCode::SUCCESS };
    if let Some(message) = error.message() {
        // If standard error is closed, the exit code is all that is left.
        let _ = writeln!(std::io::stderr().lock(), "{message}");
    }
    ExitCode::from(error.exit_code())
}
