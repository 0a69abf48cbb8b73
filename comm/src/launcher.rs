//! Interface for the crates `launch` and `cli`, which start ranks. Not part of the stable interface for programs.
#![allow(clippy::missing_errors_doc, reason = "for one caller")]

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::connection::connect_error::ConnectError;
use crate::connection::wire::HandshakeStream;
use crate::{Result, TcpConfig};

#[cfg(feature = "cuda")]
pub use crate::backend::cuda_library::CudaLibrary;
pub use crate::base::fingerprint::digest;
pub use crate::config::address::without_brackets;
pub use crate::config::launcher_interface::{
    ELASTIC_MIN, LISTENER, LISTENER_STDIN, MASTER_PORT, MET_PREFIX, SPAWNER_PID, elastic_min,
    inherited_listener, is_worker,
};
pub use crate::config::scheduler::{addresses, local_address_towards, without_loopback};
pub use crate::failure::peer_failures::is_peer_failure_text;
pub use crate::rendezvous::death_announcement::Announcement;
pub use crate::rendezvous::meeting_point::HOST as MEETING_HOST;
pub use crate::rendezvous::preflight::check_for_ranks;
pub use ops::kernels::lock;

/// Error of a receive or send on a connection between launchers.
#[derive(Debug)]
pub struct Broken(ConnectError);

impl Broken {
    /// Returns whether the other side has closed the connection.
    pub fn is_end(&self) -> bool {
        matches!(self.0, ConnectError::Closed)
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A connection between two launchers. [`meet`] returns only those on which each side has proved that it belongs to the
/// job.
#[derive(Debug)]
pub struct Connection(HandshakeStream);

/// Connects the launchers of a job, in the same way as ranks: the first one gets a connection to each other one, and
/// those get one to the first.
pub fn meet(config: &TcpConfig) -> Result<Vec<Connection>> {
    let met = crate::rendezvous::meet(config)?;
    Ok(met.control.into_iter().flatten().map(|stream| Connection(stream.into())).collect())
}

impl Connection {
    /// Makes a connection on which the other side has proved nothing.
    pub fn new(stream: TcpStream) -> std::result::Result<Self, Broken> {
        HandshakeStream::new(stream, None).map(Self).map_err(Broken)
    }

    /// Encodes a message as it is sent.
    pub fn frame(message: &impl Serialize) -> std::result::Result<Vec<u8>, Broken> {
        HandshakeStream::frame(message).map_err(Broken)
    }

    /// Sends bytes.
    pub fn write(&mut self, bytes: &[u8], deadline: Instant) -> std::result::Result<(), Broken> {
        self.0.write(bytes, deadline).map_err(Broken)
    }

    /// Receives a message of at most `limit` bytes.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        limit: usize,
        deadline: Instant,
    ) -> std::result::Result<T, Broken> {
        self.0.receive(limit, deadline).map_err(Broken)
    }

    /// Returns another handle of this connection, for another thread.
    pub fn again(&self) -> Self {
        Self(self.0.clone_handle())
    }

    /// Closes the connection in such a way that the other side can still read what was sent.
    pub fn hang_up(&mut self) {
        self.0.close_gracefully();
    }

    /// Shuts the connection down in both directions.
    pub fn cut(&self) {
        self.0.shutdown();
    }

    /// Returns the address of the other side.
    pub fn peer(&self) -> std::result::Result<SocketAddr, Broken> {
        self.0.peer().map_err(Broken)
    }

    /// Returns the socket, to set options on it.
    pub fn socket(&self) -> &TcpStream {
        self.0.socket()
    }
}
