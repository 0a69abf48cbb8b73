//! Socket options.

use std::net::TcpStream;
use std::time::Duration;

/// Whether another socket can listen on a port to which a socket is bound that does not listen.
pub(crate) fn leaves_port_free() -> bool {
    false
}

/// Makes the connection fail if the other side does not acknowledge sent data for this long.
pub(crate) fn end_when_unconfirmed(stream: &TcpStream, after: Duration) {
    super::apple::end_when_unconfirmed(stream, after);
}
