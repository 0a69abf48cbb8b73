//! What ranks know of each other once they have met.

use std::net::SocketAddr;

use crate::rendezvous::site::Site;

/// What is known of a rank's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where it takes data connections.
    pub(crate) address: SocketAddr,
    pub(crate) site: Site,
    /// The port of its door, where the group may change; else 0.
    pub(crate) door: u16,
}
