//! A port at which somebody else is going to listen.

use std::io;
use std::net::SocketAddr;

use comm::{Error, Result};
use socket2::{Domain, Socket, Type};

use crate::platform::socket::leaves_port_free;

/// A port of this machine at which somebody else is going to listen. On Linux the system gives it to nobody by itself while this
/// lives; macOS has no such thing, and the port is one that was free a moment ago.
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
    /// Reserves a port; any free one where that of the address is 0.
    ///
    /// # Errors
    /// [`Error::Listen`] where somebody listens there, or the address is not this machine's.
    pub fn at(address: SocketAddr) -> Result<Self> {
        Self::bind(address)
            .map_err(|reason| Error::Listen { address: address.to_string(), reason: reason.to_string() })
    }

    /// A socket that is bound, but does not listen, leaves the port to another one that may be bound there at the same time:
    /// both must allow that, which whoever is going to listen does as a rule.
    pub(super) fn bind(address: SocketAddr) -> io::Result<Self> {
        let (socket, address) = bound(address)?;
        Ok(Self { address, _socket: leaves_port_free().then_some(socket) })
    }

    /// With the port that was found.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// A socket that is bound there, and where that is.
pub(super) fn bound(address: SocketAddr) -> io::Result<(Socket, SocketAddr)> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    let address = socket.local_addr()?.as_socket();
    let address = address.ok_or_else(|| io::Error::other("the system tells no port"))?;
    Ok((socket, address))
}
