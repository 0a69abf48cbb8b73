//! `girandole launch`: starts any program as the ranks of a job on this machine, or on this one and others, in `torchrun`'s
//! place.

mod nproc;
mod options;
mod pet;
mod program;
mod strange;
mod tee;

use std::ffi::OsString;
use std::io::IsTerminal;

use comm::Secret;
use launch::{LogConfig, MasterPort, SpawnConfig};
use report::trace;

use crate::console::note;
use crate::error::{Error, Result};
use crate::start::{SPAWNED_FOR, spawn_with_bar};

use pet::Pet;
use program::Program;

pub use options::LaunchOptions;

/// What a command of this program exits with where it was called wrongly: it would be the next time, too.
const WRONG_OPTION: i32 = 2;
/// Where the launchers of several nodes meet, `torchrun`'s.
const MEETING_PORT: u16 = 29500;

/// Runs the program as ranks, until all have ended.
///
/// # Errors
/// Options that cannot be used, a program that cannot be run, the first rank that failed.
pub fn run(options: &LaunchOptions) -> Result<()> {
    trace::install(false)?;
    let config = config(options, &Pet::from_env())?;
    config.check().map_err(named)?;
    if let Some(logs) = config.logs.as_ref().filter(|logs| !logs.show_stdout && !logs.show_stderr) {
        note(format_args!(
            "what the ranks print goes to files in {}; with --tee it is shown, too",
            logs.dir.display()
        ));
    }
    let ended = spawn_with_bar(config).map(drop).map_err(named);
    if is_input_left() {
        note(format_args!(
            "the standard input of launch is not passed on to the ranks, and nobody has read it"
        ));
    }
    ended
}

/// True where somebody has written to this process's standard input, or it is a file. What is typed into a terminal is left to
/// whoever reads that next.
fn is_input_left() -> bool {
    let input = std::io::stdin();
    !input.is_terminal() && rustix::io::ioctl_fionread(&input).is_ok_and(|bytes| bytes > 0)
}

fn config(options: &LaunchOptions, pet: &Pet) -> Result<SpawnConfig> {
    let (name, args) = options.command.split_first().ok_or_else(|| no_program("nothing"))?;
    strange::check(name)?;
    let program = Program::find(name)?;
    let local_world_size = options.nproc_per_node(pet)?.count()?;
    let (nodes, node_rank) = options.nodes(pet)?;
    let too_many = || Error::Option {
        option: "--nnodes",
        got: nodes.to_string(),
        help: format!("with {local_world_size} ranks on each that is more than can be counted"),
    };
    let world_size = local_world_size.checked_mul(nodes).ok_or_else(too_many)?;
    let elastic = options.elastic(world_size)?;
    let default_port = if nodes > 1 { MEETING_PORT } else { 0 };
    let logs = options.log_dir.as_ref().map(|dir| {
        let tee = options.tee.unwrap_or_default();
        LogConfig { dir: dir.clone(), show_stdout: tee.stdout, show_stderr: tee.stderr }
    });
    let defaults = SpawnConfig::default();
    Ok(SpawnConfig {
        world_size,
        nodes,
        node_rank,
        secret: if nodes > 1 { Secret::from_env()? } else { None },
        tls: options.tls()?,
        join_timeout: options.timeout.unwrap_or(defaults.join_timeout),
        max_restarts: options.max_restarts(pet)?,
        elastic,
        final_code: program.is_this_one.then_some(WRONG_OPTION),
        logs,
        port_kind: if program.is_this_one { MasterPort::Inherited } else { MasterPort::Reserved },
        program: Some(program.path),
        args: Some(args.to_vec()),
        env: environment(options, local_world_size),
        master_addr: options.master_addr(pet, nodes)?.unwrap_or(defaults.master_addr),
        master_port: options.master_port(pet)?.unwrap_or(default_port),
        sweep: true,
        ..SpawnConfig::default()
    })
}

/// What the ranks are told beside their place.
fn environment(options: &LaunchOptions, local_world_size: usize) -> Vec<(OsString, OsString)> {
    let unset = |name: &str| std::env::var_os(name).is_none();
    // Nobody tells the end of the story for these ranks, whoever has started this process.
    let mut variables = vec![(SPAWNED_FOR, String::new())];
    if local_world_size > 1 && unset("OMP_NUM_THREADS") {
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
                "log_dir" => "--log-dir",
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
