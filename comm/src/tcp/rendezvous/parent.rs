//! The group whose ranks make a new one: what it learns of them while they meet.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::Error;
use crate::supervisor::Supervisor;

/// A group, some of whose ranks meet to be another one.
#[derive(Debug, Clone)]
pub(crate) struct Parent {
    pub(crate) supervisor: Arc<dyn Supervisor>,
    /// Becomes readable when it has failed.
    pub(crate) ended: Arc<UnixStream>,
}

impl Parent {
    /// Why it has failed, if it has, as the error of `operation`.
    pub(super) fn failure(&self, operation: String) -> Option<Error> {
        let cause = self.supervisor.failure()?;
        let supervisor = &self.supervisor;
        let host = |rank| supervisor.host(rank);
        Some(cause.to_error(supervisor.rank(), operation, supervisor.timeout(), supervisor.members(), host))
    }
}
