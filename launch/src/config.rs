//! Configuration of a job: which program to start, and as how many ranks.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use comm::{Error, ExitKind, Result, Secret, Tls};
use rustix::process::{Resource, getrlimit};

use crate::logs::{LogFile, Stream};
use crate::{ElasticJob, LogConfig, MasterPort, Notes};

/// Files that a process has open apart from those that the launcher needs for each rank.
const FILES_ASIDE: u64 = 32;
/// Files for each rank: two pipes and a process handle.
const FILES_PER_RANK: u64 = 3;
/// Files for a rank that may be started later: both ends of two pipes.
const FILES_PER_SPARE: u64 = 4;
/// Additional files for each rank whose output is logged: one for each stream.
const LOGS_PER_RANK: u64 = 2;

/// Configuration of [`spawn`](super::spawn).
///
/// ```
/// use launch::SpawnConfig;
///
/// let config = SpawnConfig { world_size: 4, ..SpawnConfig::default() };
/// assert!(config.program.is_none());
/// ```
#[derive(Debug, Clone)]
pub struct SpawnConfig {
    /// Number of ranks on all nodes together. Default: 1.
    pub world_size: usize,
    /// Number of machines. Each has its own launcher and the same number of ranks. Default: 1.
    pub nodes: usize,
    /// Index of this machine among the nodes. Default: 0.
    pub node_rank: usize,
    /// Secret with which the launchers of several nodes authenticate each other; the ranks get it, too. Default:
    /// `None`; required where the nodes meet at an address other than loopback. Without one, the ranks of a single node
    /// get a new secret for each job.
    pub secret: Option<Secret>,
    /// Which connections between the launchers of several nodes are encrypted. The ranks' own connections are
    /// configured separately. Default: [`Tls::Off`].
    pub tls: Tls,
    /// How long the launchers of several nodes wait for each other: until all have joined, and later, once the ranks of
    /// this node have ended, for a launcher from which nothing is received. Also the limit for resolving `master_addr`,
    /// on one node, too. Default: 300 s. A launcher that has joined is given at least 1 s.
    pub join_timeout: Duration,
    /// How often all ranks are restarted after one of them has failed. The same on all nodes. Default: 0.
    pub max_restarts: usize,
    /// Lets the remaining ranks continue when some fail. The minimum must be the same on all nodes. Default: `None`:
    /// the first failure ends the job.
    pub elastic: Option<ElasticJob>,
    /// Exit code after which a restart is useless, because the rank would fail again. Default: `None`.
    pub final_code: Option<i32>,
    /// Writes the output of the ranks to log files. Default: `None`.
    pub logs: Option<LogConfig>,
    /// The program that each rank runs. Default: `None`, the executable of this process.
    pub program: Option<PathBuf>,
    /// Its arguments, without the program's name. Default: `None`, those of this process.
    pub args: Option<Vec<OsString>>,
    /// Variables to add to the environment that the ranks inherit from this process. The variables that the launcher
    /// sets for a rank (`RANK` and the like) cannot be overridden. Default: none.
    pub env: Vec<(OsString, OsString)>,
    /// Rendezvous address of the ranks, an address of the first node. Default: 127.0.0.1.
    pub master_addr: String,
    /// Rendezvous port. Default: 0, any free port. On several nodes the launchers use it, and the ranks use another
    /// one.
    pub master_port: u16,
    /// Which process listens on the port. Default: [`MasterPort::Inherited`].
    pub port_kind: MasterPort,
    /// Also ends processes that the ranks' programs have started and left running, however this process ends. A second
    /// process of this program does this, so the program must call [`worker_guard`](crate::worker_guard) first thing in
    /// `main`. It knows the ranks, and recognizes the processes that they have started by an environment variable.
    /// (macOS does not show the environment of its own programs, such as `sleep`; these are left running.)
    /// Default: false.
    pub sweep: bool,
    /// Receives the notes of the ranks. Default: `None`, and the ranks send none.
    pub notes: Option<Arc<dyn Notes>>,
    /// How long the other ranks may take to end by themselves after one has failed, or after a signal was passed on to
    /// them. Default: 3 s, which is longer than they need to find out which rank is missing when that rank is stopped.
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
    /// Checks the configuration before anything is started, as [`spawn`](super::spawn) does. For programs that do other
    /// work first and want to report errors before that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`]: a world size of 0; more ranks and replacements than the limit on open files allows,
    /// pipes and logs included; inconsistent node settings; a log folder that cannot be created; a call in a rank that
    /// would start its own program again, or launchers that are nested too deeply.
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

    /// Checks that a limit of `files` open files is enough for all ranks, their logs and the replacements.
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

    /// Returns the arguments of the program that each rank runs.
    pub(super) fn arguments(&self) -> Vec<OsString> {
        self.args.clone().unwrap_or_else(|| std::env::args_os().skip(1).collect())
    }

    /// Number of ranks that may be started in place of lost ones.
    pub(super) fn spares(&self) -> usize {
        self.elastic.as_ref().map_or(0, |elastic| elastic.replace)
    }

    /// Number of ranks on this machine.
    pub fn local_world_size(&self) -> usize {
        self.world_size / self.nodes.max(1)
    }

    /// Whether ranks that ended with this status would fail again after a restart.
    pub(super) fn is_final(&self, status: ExitKind) -> bool {
        self.final_code.is_some_and(|code| status == ExitKind::Code(code))
    }

    /// Whether this variable is already set for the ranks, by the configuration or by inheritance.
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
