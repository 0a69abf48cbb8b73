//! What wakes a rank that sleeps: a file descriptor, so that it can sleep on its sockets at the same time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Result, read, write};

/// An event counter that others hold as well.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// A bell that another process has made.
    pub(super) fn of(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Wakes its owner, now or when it next wants to sleep.
    pub(super) fn ring(&self) {
        // One that cannot count any higher rings already.
        let _ = write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn silence(&self) {
        let _ = read(&self.0, &mut [0; 8]);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
