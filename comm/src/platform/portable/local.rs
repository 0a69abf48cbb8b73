//! Connections between processes of one machine, which descriptors can be sent over: unix sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use rustix::io::{Errno, Result};
use rustix::net::RecvFlags;

pub(crate) use super::apple::is_of_this_user;

/// No flag does it: see `fcntl_setfd`.
pub(crate) const NOT_INHERITED: RecvFlags = RecvFlags::empty();

/// Where other processes of this machine can connect to this one. Its file is there as long; a process that is killed in the
/// meantime leaves it, without any content.
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

    /// The next one that has connected. Does not wait, and neither do connections.
    pub(crate) fn accept(&self) -> Result<OwnedFd> {
        self.listener.accept().and_then(|(stream, _)| without_waiting(stream)).map_err(number)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A connection to the process that listens under this name.
pub(crate) fn connect(name: &[u8; 16]) -> Result<OwnedFd> {
    UnixStream::connect(path(name)).and_then(without_waiting).map_err(number)
}

fn without_waiting(stream: UnixStream) -> io::Result<OwnedFd> {
    stream.set_nonblocking(true)?;
    Ok(stream.into())
}

/// Not in `TMPDIR`: that may be another one for each rank, and longer than a socket's name may be (104 bytes on macOS). Nobody
/// can guess the name, and both ends see whose process is at the other.
fn path(name: &[u8; 16]) -> PathBuf {
    format!("/tmp/girandole-{:032x}", u128::from_be_bytes(*name)).into()
}

fn number(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
