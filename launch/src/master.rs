//! The rendezvous port of the ranks, held by the launcher.

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use comm::launcher::{addresses, without_loopback};
use comm::{Error, Result};

use super::nodes;
use super::reserved::{ReservedPort, bound};
use crate::{MasterPort, SpawnConfig};

/// Backlog: number of connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// The rendezvous port; open or reserved until this is dropped.
pub(super) struct Master {
    socket: MasterSocket,
    pub(super) port: u16,
}

enum MasterSocket {
    Listener(TcpListener),
    Reserved(ReservedPort),
}

impl Master {
    /// Opens the port on `host`, if given, else on the first address of `master_addr` that belongs to this machine. On
    /// several nodes the launchers use the configured port, so the ranks get a free one, and a host name that resolves to
    /// loopback only is refused.
    pub(super) fn open(config: &SpawnConfig, host: Option<&str>) -> Result<Self> {
        let SpawnConfig { port_kind, join_timeout, .. } = config;
        let master_addr = host.unwrap_or(&config.master_addr);
        let master_port = if config.nodes > 1 { 0 } else { config.master_port };
        let wrong = |reason: &dyn Display| {
            Error::invalid("master_addr", master_addr, format!("{reason}; give an address of this machine"))
        };
        let deadline = Instant::now() + (*join_timeout).min(nodes::MAX_TIMEOUT);
        let found = addresses(master_addr, master_port, deadline)
            .map_err(|reason| wrong(&format_args!("the name has no address ({reason})")))?;
        let addresses = match config.nodes {
            1 => found,
            _ => without_loopback(master_addr, found).map_err(|reason| wrong(&reason))?,
        };
        for address in addresses {
            match hold(address, *port_kind) {
                Ok((socket, port)) => return Ok(Self { socket, port }),
                Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
                Err(error) => {
                    return Err(Error::Listen { address: address.to_string(), reason: error.to_string() });
                }
            }
        }
        Err(wrong(&"this machine does not have that address"))
    }

    /// Returns the listener that rank 0 inherits, if any, and the reservation that the launcher keeps, if any.
    pub(super) fn split(self) -> (Option<TcpListener>, Option<ReservedPort>) {
        match self.socket {
            MasterSocket::Listener(listener) => (Some(listener), None),
            MasterSocket::Reserved(reserved) => (None, Some(reserved)),
        }
    }
}

fn hold(address: SocketAddr, kind: MasterPort) -> io::Result<(MasterSocket, u16)> {
    match kind {
        MasterPort::Inherited => {
            let (socket, address) = bound(address)?;
            socket.listen(BACKLOG)?;
            Ok((MasterSocket::Listener(socket.into()), address.port()))
        }
        MasterPort::Reserved => {
            let reserved = ReservedPort::bind(address)?;
            let port = reserved.address().port();
            Ok((MasterSocket::Reserved(reserved), port))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(port_kind: MasterPort, addr: &str, master_port: u16) -> Result<Master> {
        let master_addr = addr.into();
        Master::open(&SpawnConfig { port_kind, master_addr, master_port, ..SpawnConfig::default() }, None)
    }

    #[test]
    fn a_reserved_port_can_be_listened_on_and_is_given_to_nobody_else() {
        let master = open(MasterPort::Reserved, "127.0.0.1", 0).unwrap();
        let listener = TcpListener::bind(("127.0.0.1", master.port)).unwrap();
        assert!(std::net::TcpStream::connect(("127.0.0.1", master.port)).is_ok());
        drop(listener);
        let (inherited, kept) = master.split();
        assert!(inherited.is_none() && kept.is_some());
    }

    #[test]
    fn a_port_that_somebody_listens_on_is_taken_for_both_kinds() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        for kind in [MasterPort::Inherited, MasterPort::Reserved] {
            let error = open(kind, "127.0.0.1", port).err().unwrap();
            assert!(matches!(error, Error::Listen { .. }), "{error}");
        }
    }

    #[test]
    fn a_host_must_be_this_one() {
        for (host, part) in [("192.0.2.1", "does not have"), ("no such host", "no address"), ("", "address")]
        {
            let message = open(MasterPort::Reserved, host, 0).err().unwrap().to_string();
            assert!(message.starts_with("master_addr: got ") && message.contains(part), "{message}");
        }
    }
}
