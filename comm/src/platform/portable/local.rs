//! Connections between processes of one machine, over which descriptors can be sent: unix sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use rustix::io::{Errno, Result};
use rustix::net::RecvFlags;

pub(crate) use super::apple::is_of_this_user;

/// There is no such flag; close-on-exec is set after receiving, by `fcntl_setfd`.
pub(crate) const NOT_INHERITED: RecvFlags = RecvFlags::empty();

/// A listener for other processes of this machine. Its file exists as long as it does; a process that is killed meanwhile
/// leaves the file behind, which has no content.
pub(crate) struct Listener {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    pub(crate) fn open(name: &[u8; 16]) -> Result<Self> {
        let path = path(name);
        let listener = UnixListener::bind(&path).map_err(number)?;
        // From here on the file is removed if anything fails.
        let listener = Self { listener, path };
        listener.listener.set_nonblocking(true).map_err(number)?;
        Ok(listener)
    }

    /// Returns the next connection. Neither it nor the connection ever blocks.
    pub(crate) fn accept(&self) -> Result<OwnedFd> {
        self.listener.accept().and_then(|(stream, _)| without_waiting(stream)).map_err(number)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Connects to the process that listens under this name.
pub(crate) fn connect(name: &[u8; 16]) -> Result<OwnedFd> {
    UnixStream::connect(path(name)).and_then(without_waiting).map_err(number)
}

fn without_waiting(stream: UnixStream) -> io::Result<OwnedFd> {
    stream.set_nonblocking(true)?;
    Ok(stream.into())
}

/// Not in `TMPDIR`, which may differ between ranks, and may be longer than a socket's name may be (104 bytes on macOS).
/// The name cannot be guessed, and both ends check which user's process is at the other.
fn path(name: &[u8; 16]) -> PathBuf {
    format!("/tmp/girandole-{:032x}", u128::from_be_bytes(*name)).into()
}

fn number(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
