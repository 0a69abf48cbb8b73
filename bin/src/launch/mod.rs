//! `girandole launch`: starts any program as the ranks of a job on this machine, in `torchrun`'s place.

mod nproc;
mod program;

use std::ffi::OsString;

use clap::Args;
use comm::launch::{MasterPort, SpawnConfig};

use crate::error::{Error, Result};
use crate::options::TransportOption;
use crate::start::{SPAWNED_FOR, spawn_with_bar};

use nproc::ProcessCount;
use program::Program;

pub(crate) use nproc::gpu_count;
pub(crate) use program::in_path;

/// Options of `launch`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Starts --nproc-per-node copies of PROGRAM, each a rank of one job, forwards what they print line by line, and ends all of \
them when one fails, when it is stopped by a signal, and when it is killed itself. The exit code is 0, or that of the \
first rank that failed (128 + the signal where one ended it).

A rank finds in its environment what torchrun tells it: RANK, LOCAL_RANK, NODE_RANK, GROUP_RANK, ROLE_RANK, WORLD_SIZE, \
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and TORCHELASTIC_*; OMP_NUM_THREADS=1 where it is not set and there are several \
ranks; PYTHONUNBUFFERED=1 where it is not set; and the job's secret. The commands of this program join as that rank:

  girandole launch --nproc-per-node 2 -- girandole ddp-linear
  girandole launch --nproc-per-node 4 -- python train.py --epochs 3")]
pub struct LaunchOptions {
    /// Ranks to start: a number, gpu (one for each GPU), cpu (one for each core), auto (gpu where there are some, else cpu)
    #[arg(
        long,
        visible_alias = "nproc_per_node",
        value_name = "N|gpu|cpu|auto",
        default_value = "1",
        allow_negative_numbers = true
    )]
    nproc_per_node: ProcessCount,
    /// The address of this machine at which the ranks meet
    #[arg(long, visible_alias = "master_addr", value_name = "HOST", default_value = "127.0.0.1")]
    master_addr: String,
    /// Its port [default: one that is free]
    #[arg(
        long,
        visible_alias = "master_port",
        value_name = "PORT",
        value_parser = clap::value_parser!(u16).range(1..),
        allow_negative_numbers = true
    )]
    master_port: Option<u16>,
    #[command(flatten)]
    transport: TransportOption,
    /// The program that each rank runs, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Runs the program as ranks, until all have ended.
///
/// # Errors
/// Options that cannot be used, a program that cannot be run, the first rank that failed.
pub fn run(options: &LaunchOptions) -> Result<()> {
    let world_size = options.nproc_per_node.count()?;
    let (name, args) = options.command.split_first().ok_or_else(|| no_program("nothing"))?;
    let program = Program::find(name)?;
    let config = SpawnConfig {
        world_size,
        port_kind: if program.is_this_one { MasterPort::Inherited } else { MasterPort::Reserved },
        program: Some(program.path),
        args: Some(args.to_vec()),
        env: environment(options, world_size),
        master_addr: options.master_addr.clone(),
        master_port: options.master_port.unwrap_or(0),
        sweep: true,
        ..SpawnConfig::default()
    };
    spawn_with_bar(config).map(drop).map_err(named)
}

/// What the ranks are told beside their place.
fn environment(options: &LaunchOptions, world_size: usize) -> Vec<(OsString, OsString)> {
    let unset = |name: &str| std::env::var_os(name).is_none();
    // Nobody tells the end of the story for these ranks, whoever has started this process.
    let mut variables = vec![(SPAWNED_FOR, String::new())];
    if world_size > 1 && unset("OMP_NUM_THREADS") {
        variables.push(("OMP_NUM_THREADS", "1".into()));
    }
    if unset("PYTHONUNBUFFERED") {
        // Into a pipe Python would write whole blocks, late; and a rank that is killed would lose its last one.
        variables.push(("PYTHONUNBUFFERED", "1".into()));
    }
    if let Some(transport) = options.transport.transport {
        variables.push(("GIRANDOLE_TRANSPORT", transport.to_string()));
    }
    if let Some(tls) = options.transport.tls {
        variables.push(("GIRANDOLE_TLS", tls.to_string()));
    }
    variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// The same error, of the option that held the value.
fn named(error: comm::Error) -> Error {
    match error {
        comm::Error::InvalidArgument { what, got, help } => {
            let option = match what.as_str() {
                "world_size" => "--nproc-per-node",
                "master_addr" => "--master-addr",
                "program" => "PROGRAM",
                _ => return Error::Comm(comm::Error::InvalidArgument { what, got, help }),
            };
            Error::Option { option, got, help }
        }
        comm::Error::Worker(failure) => Error::Launched(failure),
        error => Error::Comm(error),
    }
}

fn no_program(got: impl std::fmt::Display) -> Error {
    let help = "no such program; give one that is in PATH, or a path, such as ./train".into();
    Error::Option { option: "PROGRAM", got: got.to_string(), help }
}
