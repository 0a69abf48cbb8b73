//! WakeUp: wakes a rank that sleeps. A file descriptor, so that the rank can poll it together with its sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Result, read, write};

/// An eventfd of which other processes hold duplicates.
#[derive(Debug)]
pub(crate) struct WakeUp(OwnedFd);

impl WakeUp {
    pub(crate) fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Wraps the wake-up that another process has made.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Wakes its owner, now or when it next polls.
    pub(crate) fn signal(&self) {
        // Fails only if the counter is at its maximum, and then it is signalled already.
        let _ = write(&self.0, &1u64.to_ne_bytes());
    }

    /// Resets the wake-up.
    pub(crate) fn reset(&self) {
        let _ = read(&self.0, &mut [0; 8]);
    }

    /// The descriptor that its owner polls.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// The descriptor to pass to other processes, which signal it ([`WakeUp::of`]).
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
