//! The port at which a rank will accept data connections, before it does.

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Socket, Type};

use super::cannot_listen;
use crate::connection::acceptor::BACKLOG;
use crate::{Error, Result};

/// A port of this rank's where nothing listens yet: whoever connects is refused.
///
/// A rank may wait long for an offer. If it listened meanwhile without accepting, and the system had given it the port of a
/// rank that has just ended, then those who look for that one would find somebody there who does not answer.
pub(super) struct DataPort {
    socket: Socket,
    address: SocketAddr,
}

impl DataPort {
    /// Reserves a port, any one if `address` has none.
    pub(super) fn reserve(address: SocketAddr) -> Result<Self> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)
            .and_then(|socket| socket.bind(&address.into()).map(|()| socket))
            .map_err(|reason| cannot_listen(address, reason))?;
        let bound = socket.local_addr().map_err(|reason| Error::system("a socket's address", reason))?;
        Ok(Self { socket, address: bound.as_socket().unwrap_or(address) })
    }

    pub(super) fn number(&self) -> u16 {
        self.address.port()
    }

    /// Listens from now on.
    pub(super) fn listen(self) -> Result<TcpListener> {
        let Self { socket, address } = self;
        socket.listen(BACKLOG).map_err(|reason| cannot_listen(address, reason))?;
        Ok(socket.into())
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn who_connects_too_early_is_refused() {
        let port = DataPort::reserve(([127, 0, 0, 1], 0).into()).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
        assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let listener = port.listen().unwrap();
        assert_eq!(listener.local_addr().unwrap(), address);
        TcpStream::connect(address).unwrap();
    }

    #[test]
    fn a_foreign_address_is_named() {
        let error = DataPort::reserve(([203, 0, 113, 2], 0).into()).err().unwrap().to_string();
        assert!(error.contains("203.0.113.2") && error.contains("this host has no such address"), "{error}");
    }
}
