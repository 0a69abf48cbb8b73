//! Announces to ranks in the rendezvous that one of them has ended. Otherwise they would wait for it until they are
//! ended themselves, and could not name the missing rank.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use comm::launcher::Announcement;
use comm::{Error, Result};

use super::environment::Job;
use super::nodes;
use crate::{MasterPort, SpawnConfig};

/// The rank whose end is announced.
#[derive(Debug)]
pub(super) struct EndedRank {
    pub(super) rank: usize,
    /// Name of the host on which it ran.
    pub(super) host: String,
    /// Whether rank 0 runs on this node and has ended as well, or is this rank.
    pub(super) leader_has_ended: bool,
}

/// Announces the end of a rank from a thread, until this is dropped or the time limit passes.
#[derive(Debug)]
pub(super) struct FailureAnnouncer {
    /// Closing it ends the thread.
    alive: Option<UnixStream>,
    leader_has_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FailureAnnouncer {
    /// Starts the announcement, unless one is running. Only for inherited ports: programs other than ours may use that
    /// port for something else.
    pub(super) fn announce(running: &mut Option<Self>, config: &SpawnConfig, job: &Job, death: EndedRank) {
        if config.port_kind == MasterPort::Inherited && running.is_none() {
            let announcer = Self::start(config, job, death, config.failure_grace);
            *running = announcer.inspect_err(|error| tracing::debug!("{error}")).ok();
        }
    }

    fn start(config: &SpawnConfig, job: &Job, death: EndedRank, time: Duration) -> Result<Self> {
        let EndedRank { rank, host, leader_has_ended } = death;
        let failed =
            |reason: &dyn std::fmt::Display| Error::system("telling the ranks that one has ended", reason);
        let (alive, stop) = UnixStream::pair().map_err(|reason| failed(&reason))?;
        let leader_has_ended = Arc::new(AtomicBool::new(leader_has_ended));
        let announcement = Announcement {
            config: job.config_of(config, rank)?,
            host,
            until: Instant::now() + time.min(nodes::MAX_TIMEOUT),
            stop: Arc::new(stop),
            leader_has_ended: leader_has_ended.clone(),
        };
        let answer = move || {
            if let Err(error) = announcement.make() {
                tracing::debug!("the other ranks are not told: {error}");
            }
        };
        let thread = Builder::new().name("herald".into()).spawn(answer).map_err(|reason| failed(&reason))?;
        Ok(Self { alive: Some(alive), leader_has_ended, thread: Some(thread) })
    }

    /// Records that another rank of this node has ended.
    pub(super) fn note_end(&self, rank: usize) {
        self.leader_has_ended.fetch_or(rank == 0, Ordering::AcqRel);
    }
}

impl Drop for FailureAnnouncer {
    fn drop(&mut self) {
        self.alive = None;
        if let Some(thread) = self.thread.take() {
            // `join` fails only if the thread panicked, and then it has ended.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::random_hex;
    use super::*;
    use crate::message::Round;

    #[test]
    fn it_may_tell_for_ever() {
        let config = SpawnConfig { world_size: 2, failure_grace: Duration::MAX, ..SpawnConfig::default() };
        let secret = Some(random_hex::<32>().unwrap());
        let round =
            Round { run_id: "ab".repeat(16), secret, host: None, port: 1, restart: 0, max_restarts: 0 };
        let job = Job::new(&config, &round, None).unwrap();
        let death = EndedRank { rank: 1, host: comm::internal::host_name(), leader_has_ended: false };
        let announcer = FailureAnnouncer::start(&config, &job, death, config.failure_grace).unwrap();
        assert!(announcer.thread.as_ref().is_some_and(|thread| !thread.is_finished()));
    }
}
