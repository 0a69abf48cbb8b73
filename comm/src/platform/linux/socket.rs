//! Socket options.

use std::net::TcpStream;
use std::os::fd::AsFd;

use rustix::net::SendFlags;
use rustix::net::sockopt::socket_acceptconn;

/// Writing to a closed connection returns an error, and raises no signal.
pub(crate) const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;

/// Does nothing: every send passes [`NO_SIGNAL`].
pub(crate) fn without_signals(_: &TcpStream) {}

/// Returns whether the socket is listening.
pub(crate) fn is_listening(socket: impl AsFd) -> bool {
    socket_acceptconn(socket).unwrap_or(false)
}
