//! Starting a command: as the launcher of its ranks, or as one of the ranks.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use comm::launcher::check_for_ranks;
use comm::{LaunchedRank, TcpConfig};
use launch::{Notes, SpawnConfig};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backends;
use crate::error::{Error, Result};
use crate::options::RankOptions;
use crate::origin;
use crate::progress::RanksBar;
use crate::result_line;
use crate::threads;

/// Environment variable with the name of the command whose launcher started a rank. Other launchers do not set it.
pub(crate) const SPAWNED_FOR: &str = "GIRANDOLE_SPAWNED_FOR";
/// Maximum number of ranks that are started by one command on one machine: each is a process.
pub const MOST_RANKS: usize = 4096;

/// Role of this process.
#[derive(Debug)]
pub enum Start {
    /// The process that the user started: it starts the ranks.
    Launcher {
        /// Number of ranks to start.
        world_size: usize,
    },
    /// A rank, according to its environment.
    Rank {
        /// How to join the others.
        config: Box<TcpConfig>,
        /// True if this program started it, and so prints the final lines; false under another launcher.
        spawned: bool,
    },
}

impl Start {
    /// Whether this process is the one of its job that says what concerns all: the launcher, or else rank 0.
    pub fn is_speaker(&self) -> bool {
        match self {
            Self::Launcher { .. } => true,
            Self::Rank { config, spawned } => !spawned && config.rank == 0,
        }
    }

    /// Determines the role of this process from the options and the environment.
    ///
    /// # Errors
    /// An environment that is inconsistent, or that contradicts the options.
    pub fn find(options: &RankOptions, command: &str, default_world_size: usize) -> Result<Self> {
        backends::check(options)?;
        if let Some(config) = backends::config(options)? {
            return Ok(Start::Rank { config: Box::new(config), spawned: false });
        }
        let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        match (value("RANK"), value("WORLD_SIZE")) {
            _ if LaunchedRank::is_from_scheduler()? => {}
            (None, None) => {
                return Self::launcher(options, options.world_size.unwrap_or(default_world_size));
            }
            (Some(rank), None) => return Err(incomplete_environment("RANK", &rank, "WORLD_SIZE")),
            (None, Some(size)) => return Err(incomplete_environment("WORLD_SIZE", &size, "RANK")),
            (Some(_), Some(_)) => {}
        }
        let mut config = TcpConfig::from_env_at(options.init_method.clone(), options.timeout)?;
        options.transport.apply(&mut config);
        let spawned = launch::is_worker() && value(SPAWNED_FOR).is_some_and(|name| name == command);
        if let Some(world_size) = options.world_size.filter(|given| *given != config.world_size) {
            let help = match LaunchedRank::is_from_scheduler()? {
                true => format!("the scheduler has started {}; leave the option out", config.world_size),
                false => {
                    format!("the environment says WORLD_SIZE={}; leave the option out", config.world_size)
                }
            };
            return Err(Error::Option { option: "--world-size", got: world_size.to_string(), help });
        }
        Ok(Start::Rank { config: Box::new(config), spawned })
    }

    fn launcher(options: &RankOptions, world_size: usize) -> Result<Self> {
        check_world_size(world_size)?;
        // A number of ranks that exceeds the system's limits is reported before any work is done.
        SpawnConfig { world_size, ..SpawnConfig::default() }.check().map_err(|error| match error {
            comm::Error::InvalidArgument { got, help, .. } => {
                Error::Option { option: "--world-size", got, help }
            }
            other => other.into(),
        })?;
        // So are errors that the ranks would find in their environment.
        check_for_ranks(world_size, options.init_method.clone(), options.timeout)?;
        Ok(Start::Launcher { world_size })
    }
}

/// Rejects more than [`MOST_RANKS`] ranks.
///
/// # Errors
/// More than [`MOST_RANKS`].
pub fn check_world_size(world_size: usize) -> Result<()> {
    if world_size > MOST_RANKS {
        let help = format!("give 1 to {MOST_RANKS} ranks");
        return Err(Error::Option { option: "--world-size", got: world_size.to_string(), help });
    }
    Ok(())
}

fn incomplete_environment(set: &str, value: &std::ffi::OsStr, missing: &str) -> Error {
    Error::Environment {
        set: format!("{set}={}", value.to_string_lossy()),
        missing: missing.into(),
        help: format!("unset {set} to let this command start its ranks itself"),
    }
}

/// Starts ranks with this process's own arguments, waits for them, and returns what rank 0 passed to [`hand_over`].
/// `grace` is the value of `--grace`.
///
/// # Errors
/// The first cause, if a rank fails.
pub fn spawn<T: DeserializeOwned>(command: &str, world_size: usize, grace: Option<Duration>) -> Result<T> {
    spawn_with(command, SpawnConfig { world_size, ..SpawnConfig::default() }, grace, Vec::new())
}

/// Like [`spawn`], with other settings of the job, such as elasticity (then the result may come from the rank that has
/// replaced rank 0), and with additional variables in the ranks' environment.
///
/// # Errors
/// Those of [`spawn`].
pub(crate) fn spawn_with<T: DeserializeOwned>(
    command: &str,
    job: SpawnConfig,
    grace: Option<Duration>,
    variables: Vec<(OsString, OsString)>,
) -> Result<T> {
    let env = std::iter::once((SPAWNED_FOR.into(), command.into())).chain(variables).collect();
    // The ranks do not read the recipe file again: it may have changed meanwhile.
    let args = origin::arguments();
    // An elastic job has a temporary folder, which is then removed even if this process is killed.
    let sweep = job.elastic.is_some();
    let grace = grace.unwrap_or(job.grace);
    handed_over(spawn_with_bar(SpawnConfig { args, env, sweep, grace, ..job })?)
}

/// Decodes what rank 0 passed to [`hand_over`], from the results of [`launch::spawn`].
///
/// # Errors
/// It passed nothing, or something that cannot be decoded.
pub fn handed_over<T: DeserializeOwned>(results: Vec<Option<String>>) -> Result<T> {
    // Rank 0's, or that of the rank that replaced it.
    let line = results.into_iter().flatten().next();
    result_line::read(&line.ok_or_else(|| Error::NoResult { reason: "it gave none".into() })?)
}

/// Starts ranks, and shows their progress if standard error is a terminal.
///
/// # Errors
/// Those of [`launch::spawn`].
pub(crate) fn spawn_with_bar(mut config: SpawnConfig) -> launch::Result<Vec<Option<String>>> {
    if let Some(threads) = threads::for_ranks(config.local_world_size()) {
        config.env.push((threads::VARIABLE.into(), threads.into()));
    }
    let bar = RanksBar::on_terminal();
    config.notes = bar.clone().map(|bar| bar as Arc<dyn Notes>);
    let results = launch::spawn(&config);
    // Before a failure is reported.
    if let Some(bar) = bar {
        bar.clear();
    }
    results
}

/// Passes a rank's result to the process that started it.
///
/// # Errors
/// Standard output that cannot be written.
pub fn hand_over<T: Serialize>(result: &T) -> Result<()> {
    Ok(launch::report_result(&result_line::write(result)?)?)
}
