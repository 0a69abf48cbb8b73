//! Socket options.

use std::net::TcpStream;
use std::time::Duration;

use socket2::SockRef;

/// Whether another socket can listen on a port to which a socket is bound that does not listen.
pub(crate) fn leaves_port_free() -> bool {
    true
}

/// Makes the connection fail if the other side does not acknowledge sent data for this long.
pub(crate) fn end_when_unconfirmed(stream: &TcpStream, after: Duration) {
    // If the option cannot be set, the loss is noticed later.
    let _ = SockRef::from(stream).set_tcp_user_timeout(Some(after));
}
