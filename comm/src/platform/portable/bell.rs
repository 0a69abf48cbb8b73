//! Bell: wakes a rank that sleeps. A file descriptor, so that the rank can poll it together with its sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::{Errno, Result, read};
use rustix::net::send;

use super::socket::NO_SIGNAL;

/// A pair of sockets; a byte written to one wakes the owner of the other. Other processes hold the end that is written
/// to.
#[derive(Debug)]
pub(crate) struct Bell {
    /// The end where the byte arrives; only its owner has it.
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

    /// Wraps a bell that another process has made.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self { heard: None, rung: fd }
    }

    /// Wakes its owner, now or when it next polls.
    pub(crate) fn ring(&self) {
        // Fails only if the socket is full, and then the bell rings already.
        let _ = send(&self.rung, &[1], NO_SIGNAL);
    }

    /// Resets the bell.
    pub(crate) fn silence(&self) {
        // Usually more bytes than have arrived; any left over cause one more wake-up.
        let _ = read(self.fd(), &mut [0; 64]);
    }

    /// The descriptor that its owner polls.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.heard.as_ref().unwrap_or(&self.rung).as_fd()
    }

    /// The descriptor to pass to other processes, which ring it ([`Bell::of`]).
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.rung.as_fd()
    }
}
