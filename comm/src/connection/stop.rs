//! Tells threads that wait for connections to stop.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::connection::connect_error::ConnectError;
use crate::platform::wake_up::WakeUp;
use crate::{Error, Result};

/// Becomes readable when its [`StopOnDrop`] is dropped, and stays so.
#[derive(Debug)]
pub(crate) struct Stopped {
    is_over: AtomicBool,
    wake_up: WakeUp,
}

impl Stopped {
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}

impl AsFd for Stopped {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake_up.fd()
    }
}

/// Stops all that wait on the [`Stopped`] that it was made with, when it is dropped.
#[derive(Debug)]
pub(crate) struct StopOnDrop(Arc<Stopped>);

impl StopOnDrop {
    /// # Errors
    /// If the system has no descriptor left.
    pub(crate) fn new() -> Result<(Self, Arc<Stopped>)> {
        let wake_up =
            WakeUp::new().map_err(|reason| Error::system("making a wake-up", ConnectError::from(reason)))?;
        let stopped = Arc::new(Stopped { is_over: AtomicBool::new(false), wake_up });
        Ok((Self(stopped.clone()), stopped))
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::SeqCst);
        self.0.wake_up.signal();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::event::PollFlags;

    use super::*;
    use crate::connection::wire::wait_any;

    #[test]
    fn it_is_readable_from_then_on() {
        let (stop, stopped) = StopOnDrop::new().unwrap();
        let is_readable = || wait_any(&[(stopped.as_fd(), PollFlags::IN)], Instant::now()).unwrap()[0];
        assert!(!is_readable() && !stopped.is_over());
        drop(stop);
        assert!(is_readable() && is_readable() && stopped.is_over());
    }
}
