//! The group whose ranks make a new one: what it learns of them while they meet.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFlags;

use crate::Error;
use crate::blame::supervisor::Supervisor;
use crate::rendezvous::connection::wire::wait_any;

/// A group, some of whose ranks meet to be another one.
#[derive(Debug, Clone)]
pub(crate) struct Parent {
    pub(crate) supervisor: Arc<dyn Supervisor>,
    /// Becomes readable when it has failed, or was aborted.
    pub(crate) ended: Arc<UnixStream>,
}

impl Parent {
    /// Why it has ended, if it has, as the error of `operation`.
    pub(super) fn failure(&self, operation: String) -> Option<Error> {
        // Where there is a cause, it is known before this shows.
        let has_ended = self.has_ended();
        let Some(cause) = self.supervisor.failure() else {
            return has_ended.then_some(Error::Aborted { operation });
        };
        let supervisor = &self.supervisor;
        let host = |rank| supervisor.host(rank);
        Some(cause.to_error(supervisor.rank(), operation, supervisor.timeout(), supervisor.members(), host))
    }

    fn has_ended(&self) -> bool {
        wait_any(&[(self.ended.as_fd(), PollFlags::IN)], Instant::now()).is_ok_and(|ready| ready[0])
    }
}
