//! Socket options.

use std::net::TcpStream;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::sockopt::socket_type;
use rustix::net::{SendFlags, SocketType, getpeername};

/// No flag: that a write to a closed connection raises no signal is set once for each connection, by [`without_signals`].
pub(crate) const NO_SIGNAL: SendFlags = SendFlags::empty();

/// Makes a write to this connection, once it is closed, return an error instead of raising a signal.
pub(crate) fn without_signals(stream: &TcpStream) {
    super::apple::without_signals(stream);
}

/// Returns whether a socket that the launcher passed to this process is listening. The system reports only that it is a
/// stream socket without a peer.
pub(crate) fn is_listening(socket: impl AsFd) -> bool {
    socket_type(&socket) == Ok(SocketType::STREAM) && matches!(getpeername(&socket), Err(Errno::NOTCONN))
}
