//! Failure reports: a rank that stops says why, and those that wait for it return the same cause.
//!
//! The reason goes with the goodbye of each group that the rank closes, over connections that exist
//! ([`Communicator::announce_failure`]). Ranks that learn of it close their groups in turn.

use std::sync::Arc;
use std::time::{Duration, Instant};

use comm::{Communicator, Operation};

use crate::Error;

/// How long to wait until the world group reports the first failure, where a rank has left without a reason.
const WORLD_TIMEOUT: Duration = Duration::from_millis(600);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// This rank's failure, for the other ranks, and theirs.
pub(crate) struct FailureReports {
    world: Arc<dyn Communicator>,
}

impl FailureReports {
    pub(crate) fn new(world: Arc<dyn Communicator>) -> Self {
        Self { world }
    }

    /// Says why this rank stops. To be called before it closes its groups.
    pub(crate) fn report(&self, error: &Error) {
        // What another rank has caused goes with the goodbyes anyway.
        if !error.is_peer_failure() {
            self.world.announce_failure(&error.to_string());
        }
    }

    /// Replaces the error "peer left" by the cause, if the world group reports one.
    pub(crate) fn cause(&self, error: comm::Error) -> Error {
        match error {
            comm::Error::PeerFailed { rank, reason } => Error::PeerFailed { rank, reason },
            left @ comm::Error::PeerLeft { .. } => self.first_failure().unwrap_or(left).into(),
            other => other.into(),
        }
    }

    /// Waits for the world group's first failure.
    fn first_failure(&self) -> Option<comm::Error> {
        let began = Instant::now();
        while began.elapsed() < WORLD_TIMEOUT {
            // Sends nothing, but fails with that failure if there is one.
            if let Err(first) = self.world.run(Operation::Batch { messages: Vec::new() }) {
                return Some(first);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use comm::Local;

    use super::*;

    #[test]
    fn whoever_waits_hears_the_cause_however_long_it_is() {
        let lines = Local::run_shared(3, |comm| {
            // Rank 2 waits for rank 0, which waits for rank 1.
            let group = if comm.rank() < 2 { Some(comm.subgroup(&[0, 1])?) } else { None };
            let other = if comm.rank() != 1 { Some(comm.subgroup(&[2, 0])?) } else { None };
            let failures = FailureReports::new(comm.clone());
            if comm.rank() == 1 {
                let reason = "\u{1}\u{1F600}".repeat(3000);
                failures.report(&Error::BadTable { reason });
                return Ok(None);
            }
            let (waits, from) = if comm.rank() == 0 { (&group, 1) } else { (&other, 1) };
            let tensor = Tensor::zeros(1, DType::U8, &Device::Cpu)?;
            let waited = waits.as_ref().map(|group| group.run(Operation::Recv { tensor, from }));
            Ok(waited.and_then(Result::err).map(|error| failures.cause(error).to_string()))
        });
        let lines = lines.unwrap();
        let line = lines[0].clone().unwrap();
        assert!(line.starts_with("rank 1 could not go on: the table of actions is no schedule: "), "{line}");
        assert!(line.ends_with("...") && lines[2].as_ref() == Some(&line), "{line}");
    }
}
