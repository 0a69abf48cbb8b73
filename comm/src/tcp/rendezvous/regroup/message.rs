//! What is said at a door.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::super::message::Hello;

/// The longest message: a group's doors, at up to 100 bytes each.
pub(super) const LIMIT: usize = 512 * 1024;
/// In the place of a caller's number where it has none yet.
pub(super) const NOBODY: u32 = u32::MAX;

/// Who somebody is, and where its door is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Card {
    pub(crate) number: usize,
    pub(crate) door: SocketAddr,
}

/// What a rank says that comes to another one's door.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Knock {
    /// Only to see whether somebody is there.
    Probe { number: usize, generation: u64 },
    /// To come together.
    Come(Come),
    /// To become a member.
    Join { card: Card, hello: Hello },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Come {
    /// Of the newest group that it has been in.
    pub(super) generation: u64,
    pub(super) card: Card,
    /// That group.
    pub(super) people: Vec<Card>,
    pub(super) hello: Hello,
}

/// What is said to that.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// Somebody is here.
    Here,
    /// The new group: what rank this is in it, and who is, by rank.
    Seat { rank: usize, generation: u64, people: Vec<Card> },
    /// This rank does not lead.
    Elsewhere,
    /// The group goes on without the one who asks.
    Excluded,
    /// The one who asks can never be let in as it is, for this reason.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_group_stays_within_the_limit() {
        let door = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().unwrap();
        let people = (0..4096).map(|number| Card { number: number + (1 << 31), door }).collect();
        let seat = Reply::Seat { rank: 4095, generation: u64::MAX, people };
        assert!(serde_json::to_vec(&seat).unwrap().len() + 4096 < LIMIT);
    }
}
