//! How a communicator ends: what it is in the middle of has a moment to be done, or none.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the other ranks may do nothing for an operation of a communicator that was dropped.
const GRACE: Duration = Duration::from_secs(3);

/// Whether a communicator is to end. Its engine says so, and whoever waits in an operation looks.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    closed: OnceLock<Instant>,
    aborted: AtomicBool,
}

impl Ending {
    /// What is queued is done as far as the other ranks do their part.
    pub(crate) fn close(&self) {
        self.closed.get_or_init(Instant::now);
    }

    /// Nothing is done any more.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Whether an operation is to end in which nothing has come for so long.
    pub(crate) fn ends(&self, waited: Duration, timeout: Duration) -> bool {
        let grace = GRACE.min(timeout);
        let is_over = |closed: &Instant| waited >= grace && closed.elapsed() >= grace;
        self.is_aborted() || self.closed.get().is_some_and(is_over)
    }
}
