//! `girandole launch`: starts any program as the ranks of a job on one machine or several, like `torchrun`.

mod nproc;
mod options;
mod pet;
mod program;
mod tee;
mod unknown_options;

use std::ffi::OsString;
use std::io::IsTerminal;

use comm::Secret;
use experiment::console::note;
use experiment::error::{Error, Result};
use experiment::start::{SPAWNED_FOR, spawn_with_bar};
use launch::{LogConfig, MasterPort, SpawnConfig};
use report::trace;

use pet::Pet;
use program::Program;

pub use options::LaunchOptions;

/// Exit code of this program's commands for wrong options: not worth a restart, since it would occur again.
const WRONG_OPTION: i32 = 2;
/// Default port where the launchers of several nodes meet, as with `torchrun`.
const DEFAULT_MASTER_PORT: u16 = 29500;

/// Runs the program as ranks, and waits until all have ended.
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

/// True if standard input has unread data from a pipe or a file. Input typed at a terminal is ignored: the next
/// program reads it.
fn is_input_left() -> bool {
    let input = std::io::stdin();
    !input.is_terminal() && rustix::io::ioctl_fionread(&input).is_ok_and(|bytes| bytes > 0)
}

fn config(options: &LaunchOptions, pet: &Pet) -> Result<SpawnConfig> {
    let (name, args) = options.command.split_first().ok_or_else(|| no_program("nothing"))?;
    unknown_options::check(name)?;
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
    let default_port = if nodes > 1 { DEFAULT_MASTER_PORT } else { 0 };
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

/// Returns the ranks' environment variables other than rank and world size.
fn environment(options: &LaunchOptions, local_world_size: usize) -> Vec<(OsString, OsString)> {
    let unset = |name: &str| std::env::var_os(name).is_none();
    // Overrides an inherited value: no launcher prints the final lines for these ranks.
    let mut variables = vec![(SPAWNED_FOR, String::new())];
    if local_world_size > 1 && unset("OMP_NUM_THREADS") {
        variables.push(("OMP_NUM_THREADS", "1".into()));
    }
    if unset("PYTHONUNBUFFERED") {
        // Python buffers output to a pipe in blocks: lines would appear late, and a killed rank's last block would be
        // lost.
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

/// Converts an error about an argument to one that names the option it came from.
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
