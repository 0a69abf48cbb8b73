//! Messages of the rendezvous, which follow the handshake.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::machine::BuildInfo;
use super::text::sanitize;
use crate::Error;
use crate::transport::peer::PeerInfo;
use crate::transport::site::Site;

/// The longest message of one rank, in bytes.
pub(super) const LIMIT: usize = 4096;
/// The longest [`Hello`], in bytes, and the share of one rank in the longest table.
pub(super) const HELLO_LIMIT: usize = 1024;
/// Longest name of a host, in characters. Each takes up to 6 bytes in JSON.
pub(super) const MAX_HOST: usize = 128;
const MAX_DETAIL: usize = 600;

/// Returns how long a rank waits for an event that it must report to another one, which waits for `left`: a little less,
/// so that the report arrives in time.
pub(super) fn with_margin(left: Duration) -> Duration {
    left - (left / 4).min(Duration::from_millis(500))
}

/// Converts a time for a message.
pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Introduction of a rank to rank 0.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Where it accepts data connections; `None` stands for the address from which it connects.
    pub(super) ip: Option<IpAddr>,
    /// 0 where it could not listen, which it will report next.
    pub(super) port: u16,
    pub(super) host: String,
    pub(super) pid: u32,
    pub(super) site: Site,
    /// How long it will wait for the others.
    pub(super) timeout_ms: u64,
    /// Port of its listener, at the same address, where the group may change; else 0.
    #[serde(default)]
    pub(super) regroup_port: u16,
    pub(super) machine: BuildInfo,
}

/// Messages of a rank to rank 0 after [`Hello`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToLeader {
    /// It accepts connections, and is connected to the rank before it.
    Connected,
    /// It gives up.
    Failed(Failure),
}

/// Messages of rank 0 to the other ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToMember {
    /// All ranks are registered.
    Table(Table),
    /// All ranks are registered, and another one has the table for this rank.
    TableAt(TableSource),
    /// This rank is refused; the others go on waiting without it.
    Refused(String),
    /// There will be no group.
    Failed(Failure),
    /// All are connected.
    Complete,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Table {
    /// Goes into the handshakes of the data connections.
    pub(super) session: [u8; 32],
    /// How long rank 0 will wait until all are connected.
    pub(super) timeout_ms: u64,
    /// By rank.
    pub(super) ranks: Vec<Entry>,
}

/// Where a rank gets the table of ranks, if not from rank 0.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct TableSource {
    /// As in [`Table`].
    pub(super) session: [u8; 32],
    /// As in [`Table`].
    pub(super) timeout_ms: u64,
    /// The rank that passes the table on.
    pub(super) rank: usize,
    pub(super) host: String,
    /// Where it accepts data connections, and those for the table.
    pub(super) address: SocketAddr,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Where it accepts data connections. For rank 0, an unspecified address stands for the one at which it was reached.
    pub(super) address: SocketAddr,
    pub(super) host: String,
    pub(super) pid: u32,
    pub(super) site: Site,
    /// As in [`Hello`].
    #[serde(default)]
    pub(super) regroup_port: u16,
}

impl Entry {
    pub(super) fn info(&self) -> PeerInfo {
        let Self { address, pid, ref site, regroup_port, .. } = *self;
        PeerInfo { host: sanitize(&self.host, MAX_HOST), pid, address, site: site.clone(), regroup_port }
    }
}

/// Why there will be no group.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) detail: String,
    /// World rank and host of the rank that died, where that is the reason.
    pub(super) died: Option<(usize, String)>,
    /// How long the rank that gave up had waited by then, in milliseconds.
    #[serde(default)]
    pub(super) waited_ms: u64,
}

impl Failure {
    pub(super) fn of(error: &Error) -> Self {
        let (detail, died) = match error {
            Error::PeerDied { rank, host, .. } => (String::new(), Some((*rank, sanitize(host, MAX_HOST)))),
            Error::Rendezvous { detail, .. } => (sanitize(detail, MAX_DETAIL), None),
            other => (sanitize(&other.to_string(), MAX_DETAIL), None),
        };
        let waited_ms = match error {
            Error::Rendezvous { waited, .. } => milliseconds(*waited),
            _ => 0,
        };
        Self { detail, died, waited_ms }
    }

    /// Adds which rank has reported this failure.
    pub(super) fn reported_by(self, rank: usize, host: &str) -> Self {
        Self { detail: format!("rank {rank} (host {host}) gave up: {}", self.detail), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_messages_stay_within_their_limits() {
        let host = "\"".repeat(1000);
        let ip = Some("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap());
        let site = Site::longest();
        let (pid, timeout_ms) = (u32::MAX, u64::MAX);
        let hello = Hello {
            ip,
            port: u16::MAX,
            host: sanitize(&host, MAX_HOST),
            pid,
            site,
            timeout_ms,
            regroup_port: u16::MAX,
            machine: BuildInfo::of_version("1234.1234.1234-alpha.1"),
        };
        assert!(serde_json::to_vec(&hello).unwrap().len() <= HELLO_LIMIT);

        let error = Error::system("\u{1}é\u{10ffff}".repeat(1000), host);
        let failed = ToMember::Failed(Failure::of(&error));
        assert!(serde_json::to_vec(&failed).unwrap().len() <= LIMIT);
    }

    #[test]
    fn names_cannot_play_with_a_terminal() {
        assert_eq!(sanitize("a\u{1b}[2Jb\n", 100), "a [2Jb ");
    }
}
