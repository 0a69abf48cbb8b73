//! What wakes a rank that sleeps: a file descriptor, so that it can sleep on its sockets at the same time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Result, read, write};

/// An event counter that others hold as well.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// A bell that another process has made.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Wakes its owner, now or when it next wants to sleep.
    pub(crate) fn ring(&self) {
        // One that cannot count any higher rings already.
        let _ = write(&self.0, &1u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        let _ = read(&self.0, &mut [0; 8]);
    }

    /// What its owner sleeps on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// What is given to others, who ring it ([`Bell::of`]).
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
