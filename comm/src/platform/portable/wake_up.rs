//! WakeUp: wakes a rank that sleeps. A file descriptor, so that the rank can poll it together with its sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::{Errno, Result, read};
use rustix::net::send;

use super::socket::NO_SIGNAL;

/// A pair of sockets; a byte written to one wakes the owner of the other. Other processes hold the end that is written
/// to.
#[derive(Debug)]
pub(crate) struct WakeUp {
    /// The end where the byte arrives; only its owner has it.
    receiver: Option<OwnedFd>,
    sender: OwnedFd,
}

impl WakeUp {
    pub(crate) fn new() -> Result<Self> {
        let pair = || {
            let (receiver, sender) = UnixStream::pair()?;
            receiver.set_nonblocking(true)?;
            sender.set_nonblocking(true)?;
            Ok((receiver, sender))
        };
        let (receiver, sender) = pair().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        Ok(Self { receiver: Some(receiver.into()), sender: sender.into() })
    }

    /// Wraps the wake-up that another process has made.
    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self { receiver: None, sender: fd }
    }

    /// Wakes its owner, now or when it next polls.
    pub(crate) fn signal(&self) {
        // Fails only if the socket is full, and then it is signalled already.
        let _ = send(&self.sender, &[1], NO_SIGNAL);
    }

    /// Resets the wake-up.
    pub(crate) fn reset(&self) {
        // Usually more bytes than have arrived; any left over cause one more wake-up.
        let _ = read(self.fd(), &mut [0; 64]);
    }

    /// The descriptor that its owner polls.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_ref().unwrap_or(&self.sender).as_fd()
    }

    /// The descriptor to pass to other processes, which signal it ([`WakeUp::of`]).
    pub(crate) fn handle(&self) -> BorrowedFd<'_> {
        self.sender.as_fd()
    }
}
