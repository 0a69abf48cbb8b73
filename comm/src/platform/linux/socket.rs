//! Options of sockets.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::SendFlags;
use rustix::net::sockopt::socket_acceptconn;
use socket2::SockRef;

/// To write to a connection that has ended is an error, and no signal.
pub(crate) const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;

/// What [`NO_SIGNAL`] does not do for this connection.
pub(crate) fn without_signals(_: &TcpStream) {}

/// Whether connections can be accepted from it.
pub(crate) fn is_listening(socket: impl AsFd) -> bool {
    socket_acceptconn(socket).unwrap_or(false)
}

/// Whether somebody else can listen at a port to which a socket is bound that does not.
pub(crate) fn leaves_port_free() -> bool {
    true
}

/// The connection ends where the other side does not confirm what was sent for so long.
pub(crate) fn end_when_unconfirmed(stream: &TcpStream, after: Duration) {
    // Without it the end is noticed later.
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(after));
}
