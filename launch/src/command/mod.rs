//! `launch` as a command: its options, which are those of `torchrun`.

mod elastic;
mod nproc;
mod options;
mod pet;
mod program;
mod tee;
mod transport;
mod unknown_options;
mod values;

use std::ffi::OsString;

use comm::Secret;
use comm::launcher::without_brackets;

use crate::{Error, LogConfig, MasterPort, Result, SpawnConfig};

use pet::Pet;
use program::Program;

pub use elastic::ElasticRanks;
pub use options::LaunchOptions;
pub use transport::TransportOption;
pub use values::{count, learning_rate, probability, seconds, seed};

/// Exit code of this program's commands for wrong options: not worth a restart, since it would occur again.
const WRONG_OPTION: i32 = 2;
/// Default port where the launchers of several nodes meet, as with `torchrun`.
const DEFAULT_MASTER_PORT: u16 = 29500;

impl LaunchOptions {
    /// Starts the ranks with `spawn`, which is [`spawn`](crate::spawn) or calls it.
    ///
    /// # Errors
    /// Options that cannot be used, a program that cannot be run, and those of `spawn`. Each names the option that is
    /// to blame.
    pub fn run<T>(&self, spawn: impl FnOnce(SpawnConfig) -> Result<T>) -> Result<T> {
        let config = config(self, &Pet::from_env())?;
        config.check().map_err(Error::from).and_then(|()| spawn(config)).map_err(named)
    }
}

fn config(options: &LaunchOptions, pet: &Pet) -> Result<SpawnConfig> {
    let (name, args) = options.command.split_first().ok_or_else(|| no_program("nothing"))?;
    unknown_options::check(name)?;
    let program = Program::find(name)?;
    let local_world_size = options.nproc_per_node(pet)?.count()?;
    let (nodes, node_rank) = options.nodes(pet)?;
    let too_many = || {
        let help = format!("with {local_world_size} ranks on each that is more than can be counted");
        Error::invalid("--nnodes", nodes, help)
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
        shown_ranks: options.local_ranks_filter.clone(),
        role: options.role.clone().unwrap_or(defaults.role),
        grace: options.grace.unwrap_or(defaults.grace),
        port_kind: if program.is_this_one { MasterPort::Inherited } else { MasterPort::Reserved },
        program: Some(program.path),
        args: Some(args.to_vec()),
        env: environment(options, local_world_size),
        master_addr: options
            .master_addr(pet, nodes)?
            .map_or(defaults.master_addr, |host| without_brackets(&host).to_string()),
        master_port: options.master_port(pet)?.unwrap_or(default_port),
        sweep: true,
        ..SpawnConfig::default()
    })
}

/// Returns the ranks' environment variables other than rank and world size.
fn environment(options: &LaunchOptions, local_world_size: usize) -> Vec<(OsString, OsString)> {
    let unset = |name: &str| std::env::var_os(name).is_none();
    let mut variables = Vec::new();
    if local_world_size > 1 && unset("OMP_NUM_THREADS") {
        variables.push(("OMP_NUM_THREADS", "1".to_string()));
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
fn named(error: Error) -> Error {
    match error {
        Error::Comm(comm::Error::InvalidArgument { what, got, help }) => {
            let option = match what.as_str() {
                "world_size" => "--nproc-per-node",
                "master_addr" => "--master-addr",
                "program" => "PROGRAM",
                "log_dir" => "--log-dir",
                "shown_ranks" => "--local-ranks-filter",
                other => other,
            };
            Error::invalid(option, got, help)
        }
        error => error,
    }
}

fn no_program(got: impl std::fmt::Display) -> Error {
    Error::invalid("PROGRAM", got, "no such program; give one that is in PATH, or a path, such as ./train")
}
