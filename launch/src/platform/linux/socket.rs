//! Options of sockets.

use std::net::TcpStream;
use std::time::Duration;

use socket2::SockRef;

/// Whether somebody else can listen at a port to which a socket is bound that does not.
pub(crate) fn leaves_port_free() -> bool {
    true
}

/// The connection ends where the other side does not confirm what was sent for so long.
pub(crate) fn end_when_unconfirmed(stream: &TcpStream, after: Duration) {
    // Without it the end is noticed later.
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(after));
}
