//! Commands that train on ranks: the options that they share, the processes that become ranks, checkpoints and elasticity, a
//! log, a report, and errors with exit codes. There are two kinds: experiments, which this crate's [`trainer`] trains, and the
//! commands for language models ([`language`]), which `girandole::trainer` trains.
//!
//! A program gives what is its own: data, a model, a loss, and what it prints. Read it in this order:
//!
//! - [`Command`] and [`run()`]: what a command gives that trains on ranks, and the steps that are the same for all of them.
//!   [`Experiment`]: what it gives besides if it trains with [`trainer`]. [`prelude`]: what most experiments import.
//! - [`options`]: the options that a command flattens into its own, such as `--world-size`, `--checkpoint-dir` and `--elastic`.
//! - [`trainer`]: the training loop over epochs or steps, which resumes, and goes on when ranks are lost or come.
//! - [`same_options`]: which options must be the same on all ranks, which is checked before any of them trains.
//! - [`rank`], [`start`]: one process of the job, and how it becomes one.
//! - [`run_log`], `live_page`, [`progress`], [`console`], [`outputs`]: what a run writes, and where.
//! - [`program`]: a program of several such commands, with two pages of help ([`help`]) and `--recipe` ([`recipe`]).
//! - [`language`]: the commands for language models, such as `pretrain` and `generate`.
//! - [`plan`], [`comm_bench`]: the commands that show what layouts and collectives cost. [`launch`]: any program as ranks. [`shell`]:
//!   completions and man pages.
//! - [`error`]: all that can go wrong, with the message and the exit code.
//! - [`backends`], [`memory_check`], [`threads`]: what this machine has, and what fits in it.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use candle_core::Tensor;
//! use candle_nn::{Linear, Module, linear, loss};
//! use clap::{Args, Parser};
//! use ddp::{Ddp, DdpConfig};
//! use cli::prelude::*;
//! use training::{Sgd, SgdConfig};
//!
//! /// Learns to double a number.
//! #[derive(Clone, Args)]
//! struct Double {
//!     #[command(flatten)]
//!     common: CommonOptions,
//!     #[command(flatten)]
//!     loader: LoaderOptions,
//!     #[arg(long, default_value = "10")]
//!     epochs: usize,
//! }
//!
//! impl Command for Double {
//!     const NAME: &'static str = "double";
//!     const WORLD_SIZE: usize = 2;
//!     type Setup = Variables;
//!     type Trained = RunSeries;
//!
//!     options_of!(common);
//!
//!     fn check(&self, _world_size: usize) -> Result<()> {
//!         Ok(())
//!     }
//!
//!     fn setup(&self) -> Result<Variables> {
//!         let variables = Variables::new(&self.common)?;
//!         variables.make(&self.common, |builder| linear(1, 1, builder))?;
//!         Ok(variables)
//!     }
//!
//!     fn train(&self, variables: Variables, rank: &mut Rank) -> Result<RunSeries> {
//!         let (samples, sampler) = (Arc::new((0..64u8).map(f32::from).collect::<Vec<_>>()), rank.sampler(64, true)?);
//!         let loader = self.loader.loader(samples, sampler, 8, &variables.device, |x, device| {
//!             let x = Tensor::new(x, device)?.reshape(((), 1))?;
//!             Ok((x.clone(), (x * 2.0)?))
//!         })?;
//!         let ddp = Ddp::new(rank.comm.clone(), variables.builder(), &DdpConfig::default(), |b| linear(1, 1, b))?;
//!         let optimizer = Sgd::named(ddp.named_vars(), SgdConfig { learning_rate: 1e-4, ..SgdConfig::default() })?;
//!         let loss = |model: &Linear, (x, y): &(Tensor, Tensor)| loss::mse(&model.forward(x)?, y);
//!         let model = DataParallel::new(ddp, optimizer, loss, &variables.map);
//!         let mut losses = Losses(|step: &Step<'_>, loss| step.say(format_args!("{loss}")));
//!         Ok(Trainer::new(model, Epochs::new(loader)).run(rank, &self.run_config(rank), &mut losses)?.series)
//!     }
//!
//!     fn report(&self, outcome: Outcome<RunSeries>) -> Report {
//!         Report { runs: vec![outcome.trained], ..Report::default() }
//!     }
//! }
//!
//! impl Experiment for Double {
//!     options_of!(epochs);
//! }
//!
//! /// The program, of which `double` is the only command.
//! #[derive(Parser)]
//! enum Program {
//!     Double(Double),
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     cli::program::main(|Program::Double(double)| cli::run(&double))
//! }
//! ```
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "what an experiment prints is its result")]

pub mod backends;
pub mod comm_bench;
mod command;
pub mod console;
mod devices;
pub mod error;
mod experiment;
pub mod held;
pub mod help;
pub mod interrupt;
pub mod language;
pub mod launch;
mod live_page;
pub mod memory_check;
mod option_methods;
mod option_values;
pub mod options;
pub mod origin;
pub mod outputs;
pub mod plan;
pub mod prelude;
pub mod program;
pub mod progress;
pub mod rank;
pub mod recipe;
mod result_line;
mod resume;
mod run;
pub mod run_log;
pub mod same_options;
pub mod shell;
pub mod start;
pub mod threads;
pub mod trainer;
pub mod variables;

pub use command::Command;
pub use experiment::Experiment;
pub use run::run;
