//! Environment variables that the launcher sets for a rank.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread::available_parallelism;

use std::net::IpAddr;

use comm::launcher::{ELASTIC_MIN, LISTENER, MASTER_PORT, SPAWNER_PID};
use comm::{Error, InitMethod, Result, Secret, TcpConfig, Tls};

use super::nested::COMMANDS;
use super::notes;
use super::random::random_hex;
use crate::message::Round;
use crate::{NodeLayout, SpawnConfig};

const SECRET: &str = "GIRANDOLE_SECRET";
const SECRET_FILE: &str = "GIRANDOLE_SECRET_FILE";
const JOB_ID: &str = "GIRANDOLE_JOB_ID";
/// Identifies what one launcher has started in one round.
pub(super) const SPAWN_ID: &str = "GIRANDOLE_SPAWN_ID";
const TLS: &str = "GIRANDOLE_TLS";
pub(super) const BIND: &str = "GIRANDOLE_BIND";
/// Tells a rank to join the existing group of the other ranks.
pub(super) const NEWCOMER: &str = "GIRANDOLE_NEWCOMER";
const ELASTIC: &str = "GIRANDOLE_ELASTIC";
const ELASTIC_FILE: &str = "GIRANDOLE_ELASTIC_FILE";
const ELASTIC_ENDED: &str = "GIRANDOLE_ELASTIC_ENDED";
/// Variables that an outer launcher may have set for its own ranks.
const INHERITED_VARIABLES: [&str; 8] = [
    LISTENER, SECRET_FILE, "TORCHELASTIC_ERROR_FILE", NEWCOMER, ELASTIC, ELASTIC_MIN, ELASTIC_FILE,
    ELASTIC_ENDED,
];
/// Number of earlier starts of the ranks, under `torchrun`'s name.
pub(super) const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Number of candle's threads in a process.
pub(super) const THREADS: &str = "RAYON_NUM_THREADS";
/// Whether errors of libraries have the stack where they were made, behind their line.
const ERROR_BACKTRACES: &str = "RUST_LIB_BACKTRACE";

/// The settings that all ranks of this node share. Not `Debug`: it holds the secret.
pub(super) struct Job {
    layout: NodeLayout,
    node_rank: usize,
    host: String,
    round: Round,
    secret: String,
    spawn_id: String,
    /// Address on which this node's ranks listen, where ranks of other nodes must reach them.
    bind: Option<String>,
    spawner: String,
    commands: String,
    role: String,
    notes: bool,
    /// Minimum number of ranks of an elastic job; `None` if the job is not elastic.
    elastic_min: Option<usize>,
    /// File through which ranks that are started later find the group.
    group_file: Option<PathBuf>,
    /// File in which this launcher lists the ranks whose processes have ended, in an elastic job.
    ended: Option<PathBuf>,
    /// `RAYON_NUM_THREADS` for each rank; `None` if it is set already.
    threads: Option<String>,
}

impl Job {
    /// Prepares one round of a job. `address` is this node's address in a job on several nodes.
    pub(super) fn new(config: &SpawnConfig, round: &Round, address: Option<IpAddr>) -> Result<Self> {
        let cores = available_parallelism().map_or(1, usize::from);
        let local = config.local_world_size();
        let given = config.secret.as_ref().map(Secret::to_hex);
        let secret = given.or_else(|| round.secret.clone());
        let secret = secret.ok_or_else(|| {
            let help =
                "node 0 was given one: give the same here, in GIRANDOLE_SECRET or GIRANDOLE_SECRET_FILE";
            Error::invalid("the job's secret", "nothing", help)
        })?;
        let threads = (!config.sets(THREADS)).then(|| (cores / local).max(1).to_string());
        Ok(Self {
            layout: NodeLayout::new(config.nodes, local)?,
            node_rank: config.node_rank,
            host: round.host.clone().unwrap_or_else(|| config.master_addr.clone()),
            round: round.clone(),
            secret,
            spawn_id: random_hex::<16>()?,
            bind: address.filter(|_| !config.sets(BIND)).map(|address| address.to_string()),
            spawner: std::process::id().to_string(),
            commands: config.commands(),
            role: config.role.clone(),
            notes: config.notes.is_some(),
            elastic_min: config.elastic.as_ref().map(|elastic| elastic.min),
            group_file: None,
            ended: None,
            threads,
        })
    }

    /// Sets the file in which ended ranks are listed.
    pub(super) fn with_ended_file(self, file: PathBuf) -> Self {
        Self { ended: Some(file), ..self }
    }

    /// Appends to that file that the process of this rank has ended, for the ranks of this node. Only called when a
    /// launcher has seen the process end.
    pub(super) fn record_end(&self, rank: usize) {
        let Some(file) = &self.ended else { return };
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(file);
        if let Err(reason) = file.and_then(|mut file| file.write_all(format!("{rank}\n").as_bytes())) {
            tracing::warn!("the other ranks cannot be told that rank {rank} has ended: {reason}");
        }
    }

    /// Sets the file through which new ranks find the group.
    pub(super) fn with_group_file(self, file: PathBuf) -> Self {
        Self { group_file: Some(file), ..self }
    }

    /// Returns the id of what is started here. It is not secret.
    pub(super) fn spawn_id(&self) -> &str {
        &self.spawn_id
    }

    pub(super) fn round(&self) -> &Round {
        &self.round
    }

    /// Returns the global rank of a rank of this node.
    pub(super) fn rank(&self, local_rank: usize) -> usize {
        self.layout.global_rank(self.node_rank, local_rank)
    }

    /// Returns the configuration with which a rank of this job joins the group, as far as the rendezvous needs it.
    pub(super) fn config_of(&self, config: &SpawnConfig, rank: usize) -> Result<TcpConfig> {
        let tls = config.value_of(TLS).filter(|tls| !tls.is_empty());
        Ok(TcpConfig {
            rank,
            world_size: self.layout.world_size(),
            init_method: InitMethod::Tcp { host: self.host.clone(), port: self.round.port },
            secret: Some(Secret::from_hex(&self.secret)?),
            tls: tls.map_or(Ok(Tls::Off), |tls| tls.to_string_lossy().parse())?,
            job_id: self.job_id(),
            ..TcpConfig::default()
        })
    }

    /// Id of this round; differs between restarts, so that a rank of an earlier round is recognized.
    fn job_id(&self) -> String {
        format!("{}-{}", self.round.run_id, self.round.restart)
    }

    /// Writes the environment of one rank of this node.
    pub(super) fn set_environment(&self, local_rank: usize, command: &mut Command) {
        // This launcher may run as a rank of another launcher, whose variables must not reach these ranks.
        for name in INHERITED_VARIABLES {
            command.env_remove(name);
        }
        if let Some(min) = self.elastic_min {
            command.env(ELASTIC, "1").env(ELASTIC_MIN, min.to_string());
        }
        if let Some(file) = &self.group_file {
            command.env(ELASTIC_FILE, file);
        }
        if let Some(file) = &self.ended {
            command.env(ELASTIC_ENDED, file);
        }
        command.envs(self.rank_variables(local_rank)).envs(self.elastic());
        command
            .env("MASTER_ADDR", &self.host)
            .env(MASTER_PORT, self.round.port.to_string())
            .env(SECRET, &self.secret)
            .env(JOB_ID, self.job_id())
            .env(SPAWN_ID, &self.spawn_id)
            .env(SPAWNER_PID, &self.spawner)
            .env(COMMANDS, &self.commands)
            .env(notes::WANTED, if self.notes { "1" } else { "0" });
        if std::env::var_os(ERROR_BACKTRACES).is_none() {
            // An error is one line; a panic's stack is another matter.
            command.env(ERROR_BACKTRACES, "0");
        }
        if let Some(threads) = &self.threads {
            command.env(THREADS, threads);
        }
        if let Some(bind) = &self.bind {
            command.env(BIND, bind);
        }
    }

    /// Rank numbers under `torchrun`'s names: a group is a node, and all ranks have one role.
    fn rank_variables(&self, local_rank: usize) -> [(&'static str, String); 10] {
        let layout = self.layout;
        let (rank, world_size) = (layout.global_rank(self.node_rank, local_rank), layout.world_size());
        [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", layout.local_world_size().to_string()),
            ("NODE_RANK", self.node_rank.to_string()),
            ("GROUP_RANK", self.node_rank.to_string()),
            ("GROUP_WORLD_SIZE", layout.nodes().to_string()),
            ("ROLE_RANK", rank.to_string()),
            ("ROLE_WORLD_SIZE", world_size.to_string()),
            ("ROLE_NAME", self.role.clone()),
        ]
    }

    /// Variables that PyTorch programs look for. The launcher runs no store: rank 0 opens `MASTER_PORT` itself.
    fn elastic(&self) -> [(&'static str, String); 4] {
        let Round { run_id, restart, max_restarts, .. } = &self.round;
        [
            ("TORCHELASTIC_RUN_ID", run_id.clone()),
            (RESTART_COUNT, restart.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", max_restarts.to_string()),
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment_of(rank: usize, config: &SpawnConfig) -> Vec<(String, Option<String>)> {
        let mut command = Command::new("true");
        let secret = Some(random_hex::<32>().unwrap());
        let round =
            Round { run_id: "ab".repeat(16), secret, host: None, port: 29500, restart: 1, max_restarts: 3 };
        let address = (config.nodes > 1).then_some([10, 0, 0, 7].into());
        Job::new(config, &round, address).unwrap().set_environment(rank, &mut command);
        let text = |s: &std::ffi::OsStr| s.to_string_lossy().into_owned();
        command.get_envs().map(|(name, value)| (text(name), value.map(text))).collect()
    }

    fn value(variables: &[(String, Option<String>)], name: &str) -> Option<String> {
        variables.iter().find(|(n, _)| n == name).and_then(|(_, v)| v.clone())
    }

    #[test]
    fn every_job_has_its_own_secret_of_32_bytes() {
        let config = SpawnConfig { world_size: 2, ..SpawnConfig::default() };
        let (first, second) = (environment_of(1, &config), environment_of(1, &config));
        let secret = value(&first, SECRET).unwrap();
        assert_eq!(secret.len(), 64);
        assert!(secret.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_ne!(Some(secret), value(&second, SECRET));
        assert_eq!(value(&first, JOB_ID).unwrap(), "ab".repeat(16) + "-1");
        assert_ne!(value(&first, SPAWN_ID), value(&second, SPAWN_ID));
    }

    #[test]
    fn a_rank_knows_its_place_and_where_to_meet() {
        let config = SpawnConfig { world_size: 4, master_addr: "localhost".into(), ..SpawnConfig::default() };
        let environment_of = environment_of(2, &config);
        for (name, expected) in [
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("NODE_RANK", "0"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_RANK", "2"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ] {
            assert_eq!(value(&environment_of, name).as_deref(), Some(expected), "{name}");
        }
        for outer in [LISTENER, SECRET_FILE, "TORCHELASTIC_ERROR_FILE"] {
            assert!(environment_of.contains(&(outer.to_owned(), None)), "{outer}");
        }
    }

    #[test]
    fn on_several_nodes_ranks_are_counted_over_all_and_listen_on_the_nodes_address() {
        let config = SpawnConfig { world_size: 6, nodes: 3, node_rank: 1, ..SpawnConfig::default() };
        let environment_of = environment_of(1, &config);
        for (name, expected) in [
            ("RANK", "3"),
            ("WORLD_SIZE", "6"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "3"),
            (BIND, "10.0.0.7"),
            (RESTART_COUNT, "1"),
            ("TORCHELASTIC_MAX_RESTARTS", "3"),
        ] {
            assert_eq!(value(&environment_of, name).as_deref(), Some(expected), "{name}");
        }
    }

    #[test]
    fn threads_are_left_alone_where_they_are_set() {
        let env = vec![(THREADS.into(), "7".into())];
        assert_eq!(value(&environment_of(0, &SpawnConfig { env, ..SpawnConfig::default() }), THREADS), None);
    }
}
