//! Options of sockets.

use std::net::TcpStream;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::sockopt::socket_type;
use rustix::net::{SendFlags, SocketType, getpeername};

/// That to write to a connection that has ended is an error, and no signal, is said once for each connection.
pub(crate) const NO_SIGNAL: SendFlags = SendFlags::empty();

/// To write to this connection when it has ended is an error, and no signal.
pub(crate) fn without_signals(stream: &TcpStream) {
    super::apple::without_signals(stream);
}

/// Whether connections can be accepted from it, where the launcher gave it to this process: the system tells no more than that
/// it is a stream's socket without another end.
pub(crate) fn is_listening(socket: impl AsFd) -> bool {
    socket_type(&socket) == Ok(SocketType::STREAM) && matches!(getpeername(&socket), Err(Errno::NOTCONN))
}
