//! Options of sockets.

use std::net::TcpStream;
use std::os::fd::AsFd;

use rustix::net::SendFlags;
use rustix::net::sockopt::socket_acceptconn;

/// To write to a connection that has ended is an error, and no signal.
pub(crate) const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;

/// What [`NO_SIGNAL`] does not do for this connection.
pub(crate) fn without_signals(_: &TcpStream) {}

/// Whether connections can be accepted from it.
pub(crate) fn is_listening(socket: impl AsFd) -> bool {
    socket_acceptconn(socket).unwrap_or(false)
}
