//! What is said at a door.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::super::message::Hello;
use super::history::History;

/// The longest message: a group's doors, at up to 100 bytes each, and the members of a few groups.
pub(super) const LIMIT: usize = 1024 * 1024;
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
    /// Only to see whether somebody is there; with the number of the newest group that it knows.
    Probe { number: usize, generation: u64 },
    /// To come together.
    Come(Come),
    /// To become a member.
    Join { card: Card, hello: Hello },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Come {
    pub(super) card: Card,
    /// What it knows of the job's groups.
    pub(super) history: History,
    /// The highest number of a group that it has promised to take part in.
    pub(super) promised: u64,
    /// All that it knows of.
    pub(super) people: Vec<Card>,
    pub(super) hello: Hello,
}

/// What a rank answers that is offered a place in a new group: it takes part in none of a lower number any more.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Promise {
    /// The new group's.
    pub(super) number: u64,
}

/// What is said to that.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// Somebody is here.
    Here,
    /// The new group: what rank this is in it, and who is, by rank.
    Seat(Seat),
    /// This rank does not lead.
    Elsewhere,
    /// The group goes on without the one who asks.
    Excluded,
    /// There will be no new group, for this reason.
    Over(String),
    /// The one who asks can never be let in as it is, for this reason.
    Refused(String),
}

/// A place in a new group.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Seat {
    pub(super) rank: usize,
    /// What all who agree know from then on.
    pub(super) history: History,
    /// By rank.
    pub(super) people: Vec<Card>,
    /// Others that are of account for later groups.
    pub(super) others: Vec<Card>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_group_stays_within_the_limit() {
        let door = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().unwrap();
        let members: Vec<usize> = (0..4096).map(|number| number + (1 << 31)).collect();
        let card = |number: &usize| Card { number: *number, door };
        let (people, others) = (members.iter().map(card).collect(), members.iter().map(card).collect());
        let history = History::first(members.iter().copied().collect());
        let history = history.with(u64::MAX, members.iter().copied().skip(1).collect());
        let seat = Reply::Seat(Seat { rank: 4095, history, people, others });
        assert!(serde_json::to_vec(&seat).unwrap().len() + 4096 < LIMIT);
    }
}
