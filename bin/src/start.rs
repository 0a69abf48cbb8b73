//! How a command becomes ranks: it starts them itself, or finds that it is one.

use std::sync::Arc;

use comm::launch::{self, SpawnConfig};
use comm::{Communicator, Tcp, TcpConfig};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};
use crate::options::CommonOptions;

/// What this process is.
#[derive(Debug)]
pub enum Start {
    /// The one the user started: it is to start this many ranks.
    Launcher {
        /// Ranks to start.
        world_size: usize,
    },
    /// A rank, by its environment: one that this program started (`spawned`), or that another launcher did.
    Rank {
        /// How to join the others.
        config: Box<TcpConfig>,
        /// Whether the launcher is this program, which then tells the end of the story.
        spawned: bool,
    },
}

impl Start {
    /// Looks at the options and the environment.
    ///
    /// # Errors
    /// An environment that makes no sense, or that the options contradict.
    pub fn find(options: &CommonOptions, default_world_size: usize) -> Result<Self> {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if !is_set("RANK") && !is_set("WORLD_SIZE") {
            return Ok(Start::Launcher { world_size: options.world_size.unwrap_or(default_world_size) });
        }
        let mut config = TcpConfig::from_env()?;
        if let Some(timeout) = options.timeout()? {
            config.timeout = timeout;
        }
        if let Some(world_size) = options.world_size.filter(|given| *given != config.world_size) {
            let help = format!("the environment says WORLD_SIZE={}; leave the option out", config.world_size);
            return Err(Error::Option { option: "--world-size", got: world_size.to_string(), help });
        }
        Ok(Start::Rank { config: Box::new(config), spawned: launch::is_worker() })
    }
}

/// Joins the group that the configuration names.
///
/// # Errors
/// Those of [`Tcp::connect`].
pub fn join(config: &TcpConfig) -> Result<Arc<dyn Communicator>> {
    Ok(Arc::new(Tcp::connect(config)?))
}

/// Starts ranks with this process's own arguments; what rank 0 gave to [`hand_over`].
///
/// # Errors
/// The first cause, where a rank fails.
pub fn spawn<T: DeserializeOwned>(world_size: usize) -> Result<T> {
    let results = launch::spawn(&SpawnConfig { world_size, ..SpawnConfig::default() })?;
    let line = results
        .into_iter()
        .next()
        .flatten()
        .ok_or_else(|| Error::NoResult { reason: "it gave none".into() })?;
    serde_json::from_str(&line).map_err(|error| Error::NoResult { reason: error.to_string() })
}

/// Gives a rank's result to the process that started it.
///
/// # Errors
/// Standard output that cannot be written.
pub fn hand_over<T: Serialize>(result: &T) -> Result<()> {
    let line =
        serde_json::to_string(result).map_err(|error| Error::NoResult { reason: error.to_string() })?;
    Ok(launch::report_result(&line)?)
}

/// This machine's name.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
