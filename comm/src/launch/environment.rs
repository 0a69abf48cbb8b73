//! What a rank is told through its environment.

use std::net::TcpListener;
use std::process::Command;
use std::thread::available_parallelism;

use super::SpawnConfig;
use crate::{Error, Result};

/// The launcher's process id. Its presence makes a process a worker.
pub(super) const SPAWNER_PID: &str = "GIRANDOLE_SPAWNER_PID";
/// Says that the standard input is the listening socket of `MASTER_PORT`.
pub(super) const LISTENER: &str = "GIRANDOLE_LISTENER";
pub(super) const LISTENER_STDIN: &str = "stdin";
pub(super) const MASTER_PORT: &str = "MASTER_PORT";
const SECRET: &str = "GIRANDOLE_SECRET";
const SECRET_FILE: &str = "GIRANDOLE_SECRET_FILE";
const JOB_ID: &str = "GIRANDOLE_JOB_ID";
const THREADS: &str = "RAYON_NUM_THREADS";

/// What is the same for all ranks of a job. Not `Debug`: it holds the secret.
pub(super) struct Job {
    world_size: String,
    port: String,
    secret: String,
    id: String,
    spawner: String,
    /// Threads for each rank, where nobody has set them.
    threads: Option<String>,
}

impl Job {
    /// A job whose rank 0 will be reached at `listener`.
    pub(super) fn new(config: &SpawnConfig, listener: &TcpListener) -> Result<Self> {
        let address =
            listener.local_addr().map_err(|e| Error::system("cannot read the address to meet at", e))?;
        let cores = available_parallelism().map_or(1, usize::from);
        let threads = (!config.sets(THREADS)).then(|| (cores / config.world_size).max(1).to_string());
        Ok(Self {
            world_size: config.world_size.to_string(),
            port: address.port().to_string(),
            secret: random_hex::<32>()?,
            id: random_hex::<16>()?,
            spawner: std::process::id().to_string(),
            threads,
        })
    }

    /// Writes the environment of one rank.
    pub(super) fn tell(&self, rank: usize, command: &mut Command) {
        let number = rank.to_string();
        // A launcher may itself run under another one, whose word must not reach these ranks.
        command.env_remove(LISTENER).env_remove(SECRET_FILE);
        command
            .env("RANK", &number)
            .env("LOCAL_RANK", &number)
            .env("WORLD_SIZE", &self.world_size)
            .env("LOCAL_WORLD_SIZE", &self.world_size)
            .env("GROUP_RANK", "0")
            .env("MASTER_ADDR", "127.0.0.1")
            .env(MASTER_PORT, &self.port)
            .env(SECRET, &self.secret)
            .env(JOB_ID, &self.id)
            .env(SPAWNER_PID, &self.spawner);
        if let Some(threads) = &self.threads {
            command.env(THREADS, threads);
        }
        if rank == 0 {
            command.env(LISTENER, LISTENER_STDIN);
        }
    }
}

/// `N` random bytes of the operating system, as hexadecimal digits.
fn random_hex<const N: usize>() -> Result<String> {
    let mut bytes = [0_u8; N];
    getrandom::fill(&mut bytes).map_err(|e| Error::system("cannot make the job's secret", e))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(rank: usize, config: &SpawnConfig) -> Vec<(String, Option<String>)> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut command = Command::new("true");
        Job::new(config, &listener).unwrap().tell(rank, &mut command);
        let text = |s: &std::ffi::OsStr| s.to_string_lossy().into_owned();
        command.get_envs().map(|(name, value)| (text(name), value.map(text))).collect()
    }

    fn value(variables: &[(String, Option<String>)], name: &str) -> Option<String> {
        variables.iter().find(|(n, _)| n == name).and_then(|(_, v)| v.clone())
    }

    #[test]
    fn every_job_has_its_own_secret_of_32_bytes() {
        let config = SpawnConfig { world_size: 2, ..SpawnConfig::default() };
        let (first, second) = (told(1, &config), told(1, &config));
        let secret = value(&first, SECRET).unwrap();
        assert_eq!(secret.len(), 64);
        assert!(secret.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_ne!(Some(secret), value(&second, SECRET));
        assert_eq!(value(&first, JOB_ID).unwrap().len(), 32);
    }

    #[test]
    fn only_rank_0_is_told_of_the_listener() {
        let config = SpawnConfig { world_size: 2, ..SpawnConfig::default() };
        assert_eq!(value(&told(0, &config), LISTENER).as_deref(), Some(LISTENER_STDIN));
        assert_eq!(value(&told(1, &config), LISTENER), None);
    }

    #[test]
    fn threads_are_left_alone_where_they_are_set() {
        let env = vec![(THREADS.into(), "7".into())];
        assert_eq!(value(&told(0, &SpawnConfig { env, ..SpawnConfig::default() }), THREADS), None);
    }
}
