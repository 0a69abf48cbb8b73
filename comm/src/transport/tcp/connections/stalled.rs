//! Connections that stand still: the network takes what is sent, and the other side's system confirms nothing.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{ConnectionState, DataConnections};
use crate::platform::send_queue;
use crate::platform::send_queue::SendQueue;

/// How often in a row the same bytes must have been sent again. A network that loses packets now and then delivers one
/// of them; a peer that does not read still confirms.
const RETRANSMISSIONS: u8 = 3;
/// The most connections that are reported.
const MOST: usize = 4;
/// Bytes of data in a packet that every network takes.
const SMALL: u64 = 536;

/// A connection that stands still.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StalledLink {
    /// The rank at the other end.
    pub(crate) peer: usize,
    /// For how long nothing was confirmed, in milliseconds.
    pub(crate) silence_ms: u64,
    /// Both addresses, what waits, and why that may be.
    pub(crate) detail: String,
}

impl DataConnections {
    /// Returns the connections of this rank over which nothing arrives, the longest silent ones first.
    pub(crate) fn stalled_links(&self) -> Vec<StalledLink> {
        let state = self.state();
        let open = state.lines.iter().enumerate().filter_map(|(peer, line)| match line {
            ConnectionState::Open { stream, .. } => Some((peer, stream.socket())),
            _ => None,
        });
        let mut stalled: Vec<StalledLink> = open
            .filter_map(|(peer, socket)| {
                let queue = send_queue(socket).filter(is_stalled)?;
                let detail = describe([socket.local_addr().ok()?, socket.peer_addr().ok()?], &queue);
                let silence_ms = u64::try_from(queue.silence.as_millis()).unwrap_or(u64::MAX);
                Some(StalledLink { peer, silence_ms, detail })
            })
            .collect();
        stalled.sort_by_key(|link| std::cmp::Reverse(link.silence_ms));
        stalled.truncate(MOST);
        stalled
    }
}

fn is_stalled(queue: &SendQueue) -> bool {
    queue.bytes > 0 && queue.retransmissions >= RETRANSMISSIONS
}

fn describe([own, peer]: [SocketAddr; 2], queue: &SendQueue) -> String {
    let SendQueue { bytes, retransmissions, silence, segment } = *queue;
    let cause = match bytes > SMALL {
        true => format!(
            "as smaller messages came through before, packets of full size ({segment} bytes of data) may be lost on the way, \
             because their MTU is too large for it: compare `ip link` on both hosts and try `ping -M do -s {segment} {}`; \
             or a firewall drops this connection",
            peer.ip()
        ),
        false => "a firewall drops this connection, or the network between the two hosts is cut".into(),
    };
    format!(
        "{bytes} bytes from {own} to {peer} have waited for {:.1} s, and were sent again {retransmissions} times without an \
         answer; {cause}",
        silence.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_ends_and_the_likely_cause_are_told() {
        let ends = ["10.0.0.1:40000", "10.0.0.2:50000"].map(|text| text.parse().unwrap());
        let silence = Duration::from_millis(7560);
        let queue = SendQueue { bytes: 9123, retransmissions: 5, silence, segment: 8948 };
        let large = describe(ends, &queue);
        let begin = "9123 bytes from 10.0.0.1:40000 to 10.0.0.2:50000 have waited for 7.6 s, and were sent again 5 times";
        assert!(large.starts_with(begin), "{large}");
        assert!(large.contains("MTU") && large.contains("`ping -M do -s 8948 10.0.0.2`"), "{large}");
        let small = describe(ends, &SendQueue { bytes: 60, ..queue });
        assert!(!small.contains("MTU") && small.contains("a firewall drops this connection"), "{small}");
    }

    #[test]
    fn a_peer_that_does_not_read_or_a_packet_that_is_lost_is_no_stalled_link() {
        let queue = SendQueue { bytes: 1, retransmissions: 3, silence: Duration::ZERO, segment: 1448 };
        assert!(is_stalled(&queue));
        assert!(!is_stalled(&SendQueue { retransmissions: 2, ..queue }));
        assert!(!is_stalled(&SendQueue { bytes: 0, ..queue }));
    }
}
