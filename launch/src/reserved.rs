//! Reserves a port on which another process is going to listen.

use std::io;
use std::net::SocketAddr;

use comm::{Error, Result};
use socket2::{Domain, Socket, Type};

use crate::platform::socket::leaves_port_free;

/// Reservation of a port of this machine on which another process is going to listen. On Linux the system assigns the
/// port to no other process while this exists. macOS has no such feature; there the port was merely free a moment ago.
///
/// ```
/// use std::net::TcpListener;
///
/// let reserved = launch::ReservedPort::at(([127, 0, 0, 1], 0).into())?;
/// assert!(TcpListener::bind(reserved.address()).is_ok());
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug)]
pub struct ReservedPort {
    address: SocketAddr,
    _socket: Option<Socket>,
}

impl ReservedPort {
    /// Reserves the port of `address`, or any free one if that is 0.
    ///
    /// # Errors
    /// [`Error::Listen`] if the port is in use, or the address is not this machine's.
    pub fn at(address: SocketAddr) -> Result<Self> {
        Self::bind(address)
            .map_err(|reason| Error::Listen { address: address.to_string(), reason: reason.to_string() })
    }

    /// Binds a socket without listening. Another socket can then still be bound to the port and listen, if both set
    /// `SO_REUSEADDR`, which servers usually do.
    pub(super) fn bind(address: SocketAddr) -> io::Result<Self> {
        let (socket, address) = bound(address)?;
        Ok(Self { address, _socket: leaves_port_free().then_some(socket) })
    }

    /// Returns the address, with the port that was found.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Returns a socket that is bound to the address, and the actual address.
pub(super) fn bound(address: SocketAddr) -> io::Result<(Socket, SocketAddr)> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    let address = socket.local_addr()?.as_socket();
    let address = address.ok_or_else(|| io::Error::other("the system tells no port"))?;
    Ok((socket, address))
}
