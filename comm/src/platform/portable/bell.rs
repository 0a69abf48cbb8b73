//! What wakes a rank that sleeps: a file descriptor, so that it can sleep on its sockets at the same time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::{Errno, Result, read};
use rustix::net::send;

use super::socket::NO_SIGNAL;

/// A pair of sockets, through which a byte goes. Others hold the end that it is written to.
#[derive(Debug)]
pub(crate) struct Bell {
    /// Where the byte arrives; at its owner's only.
    heard: Option<OwnedFd>,
    rung: OwnedFd,
}

impl Bell {
    pub(crate) fn new() -> Result<Self> {
        let pair = || {
            let (heard, rung) = UnixStream::pair()?;
            heard.set_nonblocking(true)?;
            rung.set_nonblocking(true)?;
            Ok((heard, rung))
        };
        let (heard, rung) = pair().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        Ok(Self { heard: Some(heard.into()), rung: rung.into() })
    }

    /// A bell that another process has made.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self { heard: None, rung: fd }
    }

    /// Wakes its owner, now or when it next wants to sleep.
    pub(crate) fn ring(&self) {
        // One where no further byte fits rings already.
        let _ = send(&self.rung, &[1], NO_SIGNAL);
    }

    pub(crate) fn silence(&self) {
        // More than others have rung in the meantime, as a rule; what is left wakes once more.
        let _ = read(self.fd(), &mut [0; 64]);
    }

    /// What its owner sleeps on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.heard.as_ref().unwrap_or(&self.rung).as_fd()
    }

    /// What is given to others, who ring it ([`Bell::of`]).
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.rung.as_fd()
    }
}
