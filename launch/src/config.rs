//! What to start.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use comm::{Error, ExitKind, Result, Secret, Tls};
use rustix::process::{Resource, getrlimit};

use crate::logs::{LogFile, Stream};
use crate::{ElasticJob, LogConfig, MasterPort, Notes};

/// Files that a process has open besides those that the launcher needs for each rank.
const FILES_ASIDE: u64 = 32;
/// Files for each rank: two pipes, and a handle of the process.
const FILES_PER_RANK: u64 = 3;
/// Files for a rank that may be started later: both ends of two pipes.
const FILES_PER_SPARE: u64 = 4;
/// Beside these, where what ranks print is kept.
const LOGS_PER_RANK: u64 = 2;

/// What [`spawn`](super::spawn) starts.
///
/// ```
/// use launch::SpawnConfig;
///
/// let config = SpawnConfig { world_size: 4, ..SpawnConfig::default() };
/// assert!(config.program.is_none());
/// ```
#[derive(Debug, Clone)]
pub struct SpawnConfig {
    /// Number of ranks, those of all nodes together. Default: 1.
    pub world_size: usize,
    /// Number of machines, each with a launcher of its own and the same number of ranks. Default: 1.
    pub nodes: usize,
    /// This machine's number among them. Default: 0.
    pub node_rank: usize,
    /// What the launchers of several nodes prove to each other; the ranks get it, too. Default: `None`; where the nodes meet
    /// off loopback there must be one. The ranks of a single node get a new one each time.
    pub secret: Option<Secret>,
    /// Which connections between the launchers of several nodes are encrypted. What the ranks do is up to them. Default:
    /// [`Tls::Off`].
    pub tls: Tls,
    /// How long the launchers of several nodes wait for each other: until all are there, and later for one that is not heard of,
    /// once the ranks here have ended. Also how long a name may take as `master_addr`, on one node, too. Default: 300 s; at
    /// least 1 s is waited for a launcher that has been there.
    pub join_timeout: Duration,
    /// How often all ranks are started again after one of them has failed. The same on all nodes.
    /// Default: 0.
    pub max_restarts: usize,
    /// Lets the ranks go on when some of them fail; the same minimum on all nodes. Default: `None`, the first failure ends all.
    pub elastic: Option<ElasticJob>,
    /// A rank that fails with this exit code would do so again: no restart. Default: `None`.
    pub final_code: Option<i32>,
    /// Keeps what the ranks print in files. Default: `None`.
    pub logs: Option<LogConfig>,
    /// The program that each rank runs. Default: `None`, the executable of this process.
    pub program: Option<PathBuf>,
    /// Its arguments, without the program's name. Default: `None`, those of this process.
    pub args: Option<Vec<OsString>>,
    /// Variables to add to the environment that the ranks inherit from this process. What a rank must be told (`RANK`
    /// and the like) cannot be overridden. Default: none.
    pub env: Vec<(OsString, OsString)>,
    /// The address at which the ranks meet, one of the first node. Default: 127.0.0.1.
    pub master_addr: String,
    /// Its port. Default: 0, one that is free. On several nodes the launchers meet there, and the ranks at another one.
    pub master_port: u16,
    /// Who listens there. Default: [`MasterPort::Inherited`].
    pub port_kind: MasterPort,
    /// End also what the ranks' programs have started and left behind, however this process ends. A second process of
    /// this program sees to that, so it needs [`worker_guard`](crate::worker_guard) first thing in `main`. It knows the
    /// ranks, and what they have started by its environment. (macOS keeps that of its own programs, as `sleep`, to itself; these
    /// are left.)
    /// Default: false.
    pub sweep: bool,
    /// Gets the notes of the ranks. Default: `None`, and the ranks send none.
    pub notes: Option<Arc<dyn Notes>>,
    /// How long the other ranks may take to end by themselves once one has failed, or once a signal was passed on to
    /// them. Default: 3 s, longer than they take to find out whom they miss where that one stands still.
    pub grace: Duration,
}

impl Default for SpawnConfig {
    fn default() -> Self {
        Self {
            world_size: 1,
            nodes: 1,
            node_rank: 0,
            secret: None,
            tls: Tls::Off,
            join_timeout: Duration::from_secs(300),
            max_restarts: 0,
            elastic: None,
            final_code: None,
            logs: None,
            program: None,
            args: None,
            env: Vec::new(),
            master_addr: "127.0.0.1".into(),
            master_port: 0,
            port_kind: MasterPort::default(),
            sweep: false,
            notes: None,
            grace: Duration::from_secs(3),
        }
    }
}

impl SpawnConfig {
    /// Refuses what cannot work before anything is started, as [`spawn`](super::spawn) does: for a program that does other
    /// work first, and wants to know before that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: a world size of 0, or more ranks and replacements than this process may have pipes and logs;
    /// nodes that do not fit; a folder for logs that cannot be made; a rank that would start ranks of what it is itself.
    ///
    /// ```
    /// use launch::SpawnConfig;
    ///
    /// assert!(SpawnConfig { world_size: 2, ..SpawnConfig::default() }.check().is_ok());
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.world_size == 0 {
            return Err(Error::invalid("world_size", 0, "at least 1 rank is needed"));
        }
        self.check_nesting()?;
        self.check_nodes()?;
        self.elastic.as_ref().map_or(Ok(()), |elastic| elastic.check(self))?;
        self.logs.as_ref().map_or(Ok(()), LogConfig::check)?;
        getrlimit(Resource::Nofile).current.map_or(Ok(()), |files| self.check_files(files))
    }

    /// Refuses what needs more than so many open files.
    fn check_files(&self, files: u64) -> Result<()> {
        let logs = if self.logs.is_some() { LOGS_PER_RANK } else { 0 };
        let (ranks, spares) = (self.local_world_size() as u64, self.spares() as u64);
        let (per_rank, per_spare) = (FILES_PER_RANK + logs, FILES_PER_SPARE + logs);
        let room = files.saturating_sub(FILES_ASIDE) / per_rank;
        if ranks > room {
            let of_each = if self.logs.is_some() { " with their logs" } else { "" };
            let help = format!(
                "this process may have {files} files open, enough for {room} ranks on this machine{of_each}; start \
                 fewer, or raise the limit (ulimit -n)"
            );
            return Err(Error::invalid("world_size", ranks, help));
        }
        let room = files.saturating_sub(FILES_ASIDE + ranks * per_rank) / per_spare;
        if spares > room {
            let help = format!(
                "this process may have {files} files open, enough to replace {room} ranks beside the first {ranks}; \
                 replace fewer, or raise the limit (ulimit -n)"
            );
            return Err(Error::invalid("elastic.replace", spares, help));
        }
        Ok(())
    }

    /// The arguments of the program that each rank runs.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        self.args.clone().unwrap_or_else(|| std::env::args_os().skip(1).collect())
    }

    /// Ranks that may be started in place of lost ones.
    pub(super) fn spares(&self) -> usize {
        self.elastic.as_ref().map_or(0, |elastic| elastic.replace)
    }

    /// Ranks of this machine.
    pub fn local_world_size(&self) -> usize {
        self.world_size / self.nodes.max(1)
    }

    /// True where ranks that have ended like this would do so again.
    pub(super) fn is_final(&self, status: ExitKind) -> bool {
        self.final_code.is_some_and(|code| status == ExitKind::Code(code))
    }

    /// True where the ranks would find this variable set already.
    pub(super) fn sets(&self, variable: &str) -> bool {
        self.env.iter().any(|(name, _)| name == variable) || std::env::var_os(variable).is_some()
    }
}

impl SpawnConfig {
    pub(super) fn log(
        &self,
        run_id: &str,
        restart: usize,
        rank: usize,
        stream: Stream,
    ) -> Result<Option<LogFile>> {
        self.logs.as_ref().map(|logs| logs.open(run_id, restart, rank, stream)).transpose()
    }
}

impl ElasticJob {
    pub(super) fn check(&self, config: &SpawnConfig) -> Result<()> {
        if config.nodes > 1 && self.replace > 0 {
            let help =
                "new ranks find the group through a file of their node; on several nodes none can come";
            return Err(Error::invalid("elastic.replace", self.replace, help));
        }
        if self.min == 0 || self.min > config.world_size {
            let help = format!("the fewest ranks that go on: 1 to {}", config.world_size);
            return Err(Error::invalid("elastic", self.min, help));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_ranks_and_too_many_are_refused() {
        let none = SpawnConfig { world_size: 0, ..SpawnConfig::default() }.check().unwrap_err();
        assert_eq!(none.to_string(), "world_size: got 0; at least 1 rank is needed");
        if getrlimit(Resource::Nofile).current.is_some() {
            let many = SpawnConfig { world_size: usize::MAX, ..SpawnConfig::default() }.check().unwrap_err();
            assert!(many.to_string().contains("ulimit -n"), "{many}");
        }
    }

    #[test]
    fn logs_and_replacements_need_files_too() {
        let ranks = |world_size, replace, logs: bool| SpawnConfig {
            world_size,
            elastic: (replace > 0).then(|| ElasticJob { replace, ..ElasticJob::default() }),
            logs: logs.then(LogConfig::default),
            ..SpawnConfig::default()
        };
        let said = |config: SpawnConfig| config.check_files(64).map_err(|error| error.to_string());
        assert_eq!((said(ranks(10, 0, false)), said(ranks(6, 0, true))), (Ok(()), Ok(())));
        assert_eq!(
            said(ranks(10, 0, true)).unwrap_err(),
            "world_size: got 10; this process may have 64 files open, enough for 6 ranks on this machine with their logs; \
             start fewer, or raise the limit (ulimit -n)"
        );
        assert_eq!((said(ranks(4, 5, false)), said(ranks(2, 3, true))), (Ok(()), Ok(())));
        assert_eq!(
            said(ranks(4, 6, false)).unwrap_err(),
            "elastic.replace: got 6; this process may have 64 files open, enough to replace 5 ranks beside the first 4; \
             replace fewer, or raise the limit (ulimit -n)"
        );
        assert!(said(ranks(2, 4, true)).unwrap_err().starts_with("elastic.replace: got 4; "));
    }

    #[test]
    fn variables_of_the_configuration_count_as_set() {
        let config =
            SpawnConfig { env: vec![("LAUNCH_TEST_SET".into(), "".into())], ..SpawnConfig::default() };
        assert!(config.sets("LAUNCH_TEST_SET"));
        assert!(!config.sets("LAUNCH_TEST_NOT_SET"));
    }
}
