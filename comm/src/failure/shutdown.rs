//! Close and abort flags of a communicator: whether its pending operations may still finish.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an operation of a dropped communicator waits without progress before it is aborted.
const GRACE: Duration = Duration::from_secs(3);

/// Close and abort flags of a communicator. The engine sets them; waits inside an operation check them.
#[derive(Debug, Default)]
pub(crate) struct ShutdownFlag {
    closed: OnceLock<Instant>,
    aborted: AtomicBool,
}

impl ShutdownFlag {
    /// Marks the communicator as closed: queued operations still run, as long as the other ranks take part in them.
    pub(crate) fn close(&self) {
        self.closed.get_or_init(Instant::now);
    }

    /// Marks the communicator as aborted: operations end at once.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Returns whether an operation that has waited for `waited` without progress must end. A closed communicator's
    /// operation has a grace period of at most [`GRACE`] or `timeout`, whichever is shorter.
    pub(crate) fn must_end(&self, waited: Duration, timeout: Duration) -> bool {
        let grace = GRACE.min(timeout);
        let is_over = |closed: &Instant| waited >= grace && closed.elapsed() >= grace;
        self.is_aborted() || self.closed.get().is_some_and(is_over)
    }
}
