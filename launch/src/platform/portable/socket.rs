//! Options of sockets.

use std::net::TcpStream;
use std::time::Duration;

/// Whether somebody else can listen at a port to which a socket is bound that does not.
pub(crate) fn leaves_port_free() -> bool {
    false
}

/// The connection ends where the other side does not confirm what was sent for so long.
pub(crate) fn end_when_unconfirmed(stream: &TcpStream, after: Duration) {
    super::apple::end_when_unconfirmed(stream, after);
}
