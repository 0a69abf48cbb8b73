//! Parent group, which is watched while some of its ranks meet to form a new group.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFlags;

use crate::Error;
use crate::connection::wire::wait_any;
use crate::failure::supervisor::Supervisor;

/// A group, some of whose ranks meet to form another one.
#[derive(Debug)]
pub(crate) struct Parent {
    pub(crate) supervisor: Arc<dyn Supervisor>,
    /// Larger groups that contain these ranks. A rank that learns of the failure of one of them does not come any more;
    /// where the rank that has died is not in the parent, nothing else reports that.
    pub(crate) above: Vec<Arc<dyn Supervisor>>,
    /// Becomes readable when one of these groups has failed, or the parent was aborted.
    pub(crate) ended: Arc<UnixStream>,
}

impl Parent {
    /// Returns why not all ranks will come, as the error of `operation`; `None` where no such reason is known.
    pub(super) fn failure(&self, operation: String) -> Option<Error> {
        // Read first: where there is a cause, it is known before the stream becomes readable.
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
