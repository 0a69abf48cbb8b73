//! Messages at a listener.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::super::message::Hello;
use super::history::History;

/// The longest message, in bytes: a group's addresses, at up to 100 bytes each, and the members of a few groups.
pub(super) const LIMIT: usize = 1024 * 1024;
/// In place of a caller's number, where it has none yet.
pub(super) const NO_NUMBER: u32 = u32::MAX;

/// A rank's number in the job, and its listener.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankAddress {
    pub(crate) number: usize,
    pub(crate) address: SocketAddr,
}

/// First message of a rank that connects to another one's listener.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RegroupRequest {
    /// Checks whether the rank is there; with the number of the newest group that the sender knows.
    Probe { number: usize, generation: u64 },
    /// Comes to form a new group.
    Come(JoinAttempt),
    /// Asks to become a member.
    Join { contact: RankAddress, hello: Hello },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct JoinAttempt {
    pub(super) contact: RankAddress,
    /// What it knows of the job's groups.
    pub(super) history: History,
    /// The highest number of a group that it has promised to take part in.
    pub(super) promised: u64,
    /// The other ranks that it knows.
    pub(super) contacts: Vec<RankAddress>,
    pub(super) hello: Hello,
}

/// Answer to an offered offer in a new group: the sender takes part in no group with a lower number any more.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Promise {
    /// The new group's.
    pub(super) number: u64,
}

/// Answers at a listener.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The rank is there.
    Here,
    /// The new group: the receiver's rank in it, and its members.
    Offer(GroupOffer),
    /// This rank does not lead.
    Elsewhere,
    /// The group goes on without the rank that asks.
    Excluded,
    /// There will be no new group, for this reason.
    Over(String),
    /// The rank that asks can never be admitted as it is, for this reason.
    Refused(String),
}

/// A rank's offer in a new group.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct GroupOffer {
    pub(super) rank: usize,
    /// History of all ranks that agree to the new group.
    pub(super) history: History,
    /// By rank.
    pub(super) contacts: Vec<RankAddress>,
    /// Other ranks that count for later groups.
    pub(super) others: Vec<RankAddress>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_group_stays_within_the_limit() {
        let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().unwrap();
        let members: Vec<usize> = (0..4096).map(|number| number + (1 << 31)).collect();
        let contact = |number: &usize| RankAddress { number: *number, address };
        let (contacts, others) =
            (members.iter().map(contact).collect(), members.iter().map(contact).collect());
        let history = History::first(members.iter().copied().collect());
        let history = history.with_group(u64::MAX, members.iter().copied().skip(1).collect());
        let offer = Reply::Offer(GroupOffer { rank: 4095, history, contacts, others });
        assert!(serde_json::to_vec(&offer).unwrap().len() + 4096 < LIMIT);
    }
}
