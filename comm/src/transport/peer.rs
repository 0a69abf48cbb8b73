//! What a rank knows of each peer once they have met.

use std::net::SocketAddr;

use crate::transport::site::Site;

/// Process and addresses of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where it accepts data connections.
    pub(crate) address: SocketAddr,
    pub(crate) site: Site,
    /// Port of its listener, where the group may change; else 0.
    pub(crate) regroup_port: u16,
}
