//! Configuration of a job: which program to start, and as how many ranks.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use comm::{Result, Secret, Tls};

use crate::logs::{LogFile, Stream};
use crate::{ElasticJob, ExitKind, LogConfig, MasterPort, Notes};

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
    /// Local ranks whose output is forwarded; log files have that of all. Default: `None`, all of them.
    pub shown_ranks: Option<Vec<usize>>,
    /// Name of the ranks' role, for programs that expect `torchrun` (`ROLE_NAME`). Default: `default`.
    pub role: String,
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
    /// How long ranks may take to end once they were asked to, by a signal that was passed on to them or by SIGTERM after
    /// another rank has failed. Then they are killed, with a warning. Default: 30 s, as with `torchrun`.
    pub grace: Duration,
    /// How long the other ranks may take to end by themselves after one has failed, before they are asked to. Default: 3 s,
    /// which is longer than they need to find out which rank is missing when that rank is stopped.
    pub failure_grace: Duration,
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
            shown_ranks: None,
            role: "default".into(),
            program: None,
            args: None,
            env: Vec::new(),
            master_addr: "127.0.0.1".into(),
            master_port: 0,
            port_kind: MasterPort::default(),
            sweep: false,
            notes: None,
            grace: Duration::from_secs(30),
            failure_grace: Duration::from_secs(3),
        }
    }
}

impl SpawnConfig {
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
        self.value_of(variable).is_some()
    }

    /// Returns the value of a variable in the environment of the ranks, where this launcher does not set it.
    pub(super) fn value_of(&self, variable: &str) -> Option<OsString> {
        let given = self.env.iter().rev().find(|(name, _)| name == variable).map(|(_, value)| value.clone());
        given.or_else(|| std::env::var_os(variable))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_configuration_count_as_set() {
        let config =
            SpawnConfig { env: vec![("LAUNCH_TEST_SET".into(), "".into())], ..SpawnConfig::default() };
        assert!(config.sets("LAUNCH_TEST_SET"));
        assert!(!config.sets("LAUNCH_TEST_NOT_SET"));
    }
}
