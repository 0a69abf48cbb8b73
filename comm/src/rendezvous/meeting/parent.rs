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
#[derive(Debug)]
pub(crate) struct Parent {
    pub(crate) supervisor: Arc<dyn Supervisor>,
    /// Larger groups of which they all are. A rank that is told of the failure of one of them does not come any more, and where
    /// it is none of the parent's that has died, nobody else says so.
    pub(crate) above: Vec<Arc<dyn Supervisor>>,
    /// Becomes readable when one of them has failed, or the parent was aborted.
    pub(crate) ended: Arc<UnixStream>,
}

impl Parent {
    /// Why not all will come, if so, as the error of `operation`.
    pub(super) fn failure(&self, operation: String) -> Option<Error> {
        // Where there is a cause, it is known before this shows.
        let has_ended = self.has_ended();
        let groups = std::iter::once(&self.supervisor).chain(&self.above);
        let known = groups.filter_map(|group| Some((group, group.failure()?))).next();
        let Some((group, cause)) = known else {
            return has_ended.then_some(Error::Aborted { operation });
        };
        let host = |rank| group.host(rank);
        Some(cause.to_error(group.rank(), operation, group.timeout(), group.members(), host))
    }

    fn has_ended(&self) -> bool {
        wait_any(&[(self.ended.as_fd(), PollFlags::IN)], Instant::now()).is_ok_and(|ready| ready[0])
    }
}
