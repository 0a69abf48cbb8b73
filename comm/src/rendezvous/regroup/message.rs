//! Messages at a listener.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::super::message::Hello;
use super::knowledge::{GroupChange, Knowledge, KnowledgeDigest, RankAddress};

/// The longest message, in bytes: a group's addresses, at up to 100 bytes each, and the members of a few groups.
pub(super) const LIMIT: usize = 2 * 1024 * 1024;
/// In place of a caller's number, where it has none yet.
pub(super) const NO_NUMBER: u32 = u32::MAX;

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
    /// Digest of what it knows of the job's groups.
    pub(super) knows: KnowledgeDigest,
    /// Number of the newest of them.
    pub(super) newest: u64,
    /// Ranks that it knows to have ended.
    pub(super) ended: BTreeSet<usize>,
    /// The highest number of a group that it has promised to take part in.
    pub(super) promised: u64,
    pub(super) hello: Hello,
}

/// Answer to an offer in a new group: the sender takes part in no group with a lower number any more.
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
    /// The rank that asks knows something else than this one: it is to send its [`Knowledge`].
    Tell,
    /// The new group, and the receiver's rank in it.
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
    pub(super) change: GroupChange,
    /// What is known of the groups before, where the receiver does not know the same.
    pub(super) before: Option<Knowledge>,
}

#[cfg(test)]
mod tests {
    use super::super::history::History;
    use super::*;

    #[test]
    fn the_largest_group_stays_within_the_limit() {
        let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().unwrap();
        let members: Vec<usize> = (0..10_000).map(|number| number + (1 << 31)).collect();
        let contact = |number: &usize| RankAddress { number: *number, address };
        let history = History::first(members.iter().copied().collect());
        let history = history.with_group(u64::MAX, members.iter().copied().skip(1).collect());
        let knowledge = Knowledge { history, contacts: members.iter().map(contact).collect() };
        let change = GroupChange {
            before: [255; 16],
            number: u64::MAX,
            leader: usize::MAX,
            left_out: members.iter().copied().take(5000).collect(),
            newcomers: members.iter().take(1000).map(contact).collect(),
            ended: members.iter().copied().collect(),
        };
        let offer = Reply::Offer(GroupOffer { rank: 9999, change, before: Some(knowledge) });
        assert!(serde_json::to_vec(&offer).unwrap().len() + 4096 < LIMIT);
    }
}
