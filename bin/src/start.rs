//! How a command becomes ranks: it starts them itself, or finds that it is one.

use std::ffi::OsString;
use std::sync::Arc;

use comm::{Place, TcpConfig};
use launch::{ElasticJob, Notes, SpawnConfig};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backends;
use crate::error::{Error, Result};
use crate::options::RankOptions;
use crate::origin;
use crate::progress::RanksBar;
use crate::result_line;
use crate::threads;

/// Names the experiment whose launcher started a rank. Other launchers do not set it.
pub(crate) const SPAWNED_FOR: &str = "GIRANDOLE_SPAWNED_FOR";
/// Every rank holds a connection to every other; the communicator takes no more either.
pub(crate) const MOST_RANKS: usize = 4096;

/// What this process is.
#[derive(Debug)]
pub enum Start {
    /// The one the user started: it is to start this many ranks.
    Launcher {
        /// Ranks to start.
        world_size: usize,
    },
    /// A rank, by its environment.
    Rank {
        /// How to join the others.
        config: Box<TcpConfig>,
        /// True where this program started it, which then tells the end of the story; false under another launcher.
        spawned: bool,
    },
}

impl Start {
    /// Looks at the options and the environment.
    ///
    /// # Errors
    /// An environment that makes no sense, or that the options contradict.
    pub fn find(options: &RankOptions, command: &str, default_world_size: usize) -> Result<Self> {
        backends::check(options)?;
        if let Some(config) = backends::config(options)? {
            return Ok(Start::Rank { config: Box::new(config), spawned: false });
        }
        let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        match (value("RANK"), value("WORLD_SIZE")) {
            _ if Place::is_from_scheduler()? => {}
            (None, None) => {
                return Self::launcher(options, options.world_size.unwrap_or(default_world_size));
            }
            (Some(rank), None) => return Err(half_an_environment("RANK", &rank, "WORLD_SIZE")),
            (None, Some(size)) => return Err(half_an_environment("WORLD_SIZE", &size, "RANK")),
            (Some(_), Some(_)) => {}
        }
        let mut config = TcpConfig::from_env_at(options.init_method.clone(), options.timeout)?;
        options.transport.apply(&mut config);
        let spawned = launch::is_worker() && value(SPAWNED_FOR).is_some_and(|name| name == command);
        if let Some(world_size) = options.world_size.filter(|given| *given != config.world_size) {
            let help = match Place::is_from_scheduler()? {
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
        // What the system has no room for is said before any work is done.
        SpawnConfig { world_size, ..SpawnConfig::default() }.check().map_err(|error| match error {
            comm::Error::InvalidArgument { got, help, .. } => {
                Error::Option { option: "--world-size", got, help }
            }
            other => other.into(),
        })?;
        // So is what the ranks would find wrong with their environment.
        TcpConfig::check_for_ranks(world_size, options.init_method.clone(), options.timeout)?;
        Ok(Start::Launcher { world_size })
    }
}

/// Refuses more ranks than there can be.
pub(crate) fn check_world_size(world_size: usize) -> Result<()> {
    if world_size > MOST_RANKS {
        let help = format!("give 1 to {MOST_RANKS} ranks");
        return Err(Error::Option { option: "--world-size", got: world_size.to_string(), help });
    }
    Ok(())
}

fn half_an_environment(set: &str, value: &std::ffi::OsStr, missing: &str) -> Error {
    Error::Environment {
        set: format!("{set}={}", value.to_string_lossy()),
        missing: missing.into(),
        help: format!("unset {set} to let this command start its ranks itself"),
    }
}

/// Starts ranks with this process's own arguments; what rank 0 gave to [`hand_over`], or whoever took its place. With
/// `elastic` the others go on when ranks are lost.
///
/// # Errors
/// The first cause, where a rank fails.
pub fn spawn<T: DeserializeOwned>(
    command: &str,
    world_size: usize,
    elastic: Option<ElasticJob>,
) -> Result<T> {
    spawn_told(command, world_size, elastic, Vec::new())
}

/// The same with variables in the ranks' environment.
///
/// # Errors
/// Those of [`spawn`].
pub fn spawn_told<T: DeserializeOwned>(
    command: &str,
    world_size: usize,
    elastic: Option<ElasticJob>,
    told: Vec<(OsString, OsString)>,
) -> Result<T> {
    let env = std::iter::once((SPAWNED_FOR.into(), command.into())).chain(told).collect();
    // The ranks do not read a recipe again, which may have changed meanwhile.
    let args = origin::arguments();
    handed_over(spawn_with_bar(SpawnConfig { world_size, args, env, elastic, ..SpawnConfig::default() })?)
}

/// What rank 0 gave to [`hand_over`], from the results of [`launch::spawn`].
///
/// # Errors
/// It gave none, or something else.
pub fn handed_over<T: DeserializeOwned>(results: Vec<Option<String>>) -> Result<T> {
    // Rank 0's, or that of whoever took its place.
    let line = results.into_iter().flatten().next();
    result_line::read(&line.ok_or_else(|| Error::NoResult { reason: "it gave none".into() })?)
}

/// Starts ranks, and shows how far they are where standard error is a terminal.
pub(crate) fn spawn_with_bar(mut config: SpawnConfig) -> comm::Result<Vec<Option<String>>> {
    if let Some(threads) = threads::for_ranks(config.local_world_size()) {
        config.env.push((threads::VARIABLE.into(), threads.into()));
    }
    let bar = RanksBar::on_terminal();
    config.notes = bar.clone().map(|bar| bar as Arc<dyn Notes>);
    let results = launch::spawn(&config);
    // Before anything is said of a failure.
    if let Some(bar) = bar {
        bar.clear();
    }
    results
}

/// Gives a rank's result to the process that started it.
///
/// # Errors
/// Standard output that cannot be written.
pub fn hand_over<T: Serialize>(result: &T) -> Result<()> {
    Ok(launch::report_result(&result_line::write(result)?)?)
}

/// This machine's name.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
