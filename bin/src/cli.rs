//! The command line.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use comm::launch;

use crate::comm_bench::{self, CommBenchOptions};
use crate::error::Result;
use crate::experiment;
use crate::experiments::ddp_linear::DdpLinearOptions;

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
    /// How long collectives take, by size
    CommBench(CommBenchOptions),
}

impl Command {
    fn run(&self) -> Result<()> {
        match self {
            Command::DdpLinear(options) => experiment::run(options),
            Command::CommBench(options) => comm_bench::run(options),
        }
    }
}

/// Runs the program: parses, runs the command, and says in one line what went wrong.
pub fn main() -> ExitCode {
    let result = launch::worker_guard().map_err(Into::into).and_then(|()| Cli::parse().command.run());
    let Err(error) = result else { return ExitCode::SUCCESS };
    if let Some(message) = error.message() {
        // Where nobody reads it, the exit code has to do.
        let _ = writeln!(std::io::stderr().lock(), "{message}");
    }
    ExitCode::from(error.exit_code())
}
