//! Connections between processes of one machine, over which descriptors can be sent: unix sockets with abstract names,
//! without files.

use std::os::fd::OwnedFd;

use rustix::io::Result;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
    connect as connect_to, listen, socket_with,
};

pub(crate) use super::user::is_of_this_user;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Received descriptors are not inherited by programs that this process starts.
pub(crate) const NOT_INHERITED: RecvFlags = RecvFlags::CMSG_CLOEXEC;

/// A listener for other processes of this machine.
pub(crate) struct Listener(OwnedFd);

impl Listener {
    pub(crate) fn open(name: &[u8; 16]) -> Result<Self> {
        let listener = socket()?;
        bind(&listener, &SocketAddrUnix::new_abstract_name(name)?)?;
        listen(&listener, 4096)?;
        Ok(Self(listener))
    }

    /// Returns the next connection. Neither it nor the connection ever blocks.
    pub(crate) fn accept(&self) -> Result<OwnedFd> {
        accept_with(&self.0, FLAGS)
    }
}

/// Connects to the process that listens under this name.
pub(crate) fn connect(name: &[u8; 16]) -> Result<OwnedFd> {
    let socket = socket()?;
    connect_to(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(socket)
}

fn socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}
