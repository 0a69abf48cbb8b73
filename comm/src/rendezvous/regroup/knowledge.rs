//! What ranks tell each other of a job's groups. In a large group nearly all know the same, and tell each other only a digest of it,
//! and how the next group differs from the one before. Who knows less, or more, is told everything, or asked for it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::history::History;

/// Digest of what a rank knows, without which ranks have ended.
pub(super) type KnowledgeDigest = [u8; 16];
pub(super) type Addresses = BTreeMap<usize, SocketAddr>;

/// A rank's number in the job, and its listener.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankAddress {
    pub(crate) number: usize,
    pub(crate) address: SocketAddr,
}

/// The groups of a job, and where their ranks listen.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Knowledge {
    pub(super) history: History,
    /// The ranks that count for the next group.
    pub(super) contacts: Vec<RankAddress>,
}

impl Knowledge {
    pub(super) fn new(history: &History, addresses: &Addresses) -> Self {
        Self { history: history.clone(), contacts: contacts(history, addresses).collect() }
    }
}

/// Returns the ranks that count for the next group.
fn contacts(history: &History, addresses: &Addresses) -> impl Iterator<Item = RankAddress> {
    let numbers = history.all().into_iter();
    numbers.filter_map(|number| Some(RankAddress { number, address: *addresses.get(&number)? }))
}

/// Returns the digest of what [`Knowledge`] contains.
pub(super) fn digest(history: &History, addresses: &Addresses) -> KnowledgeDigest {
    let mut hash = Sha256::new();
    history.words().for_each(|word| hash.update(word.to_le_bytes()));
    for RankAddress { number, address } in contacts(history, addresses) {
        let ip = address.ip().to_canonical();
        hash.update((number as u64).to_le_bytes());
        hash.update(match ip {
            std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(ip) => ip.octets(),
        });
        hash.update(address.port().to_le_bytes());
    }
    let mut digest = KnowledgeDigest::default();
    digest.copy_from_slice(&hash.finalize()[..16]);
    digest
}

/// How a group differs from the newest one before it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct GroupChange {
    /// Digest of what is known of the groups before.
    pub(super) before: KnowledgeDigest,
    /// The group's number.
    pub(super) number: u64,
    /// The rank that leads, by its number in the job; it is rank 0 of the group.
    pub(super) leader: usize,
    /// Members of the group before that are not in this one, in order.
    pub(super) left_out: Vec<usize>,
    pub(super) newcomers: Vec<RankAddress>,
    /// Ranks of the groups before that are known to have ended.
    pub(super) ended: BTreeSet<usize>,
}

/// A group that is offered.
#[derive(Debug, Clone)]
pub(super) struct NextGroup {
    /// History of all ranks that agree to it.
    pub(super) history: History,
    /// By rank.
    pub(super) contacts: Vec<RankAddress>,
}

impl GroupChange {
    /// Returns the group that follows from those before. `None` where that needs the address of a rank that is not known.
    pub(super) fn apply(&self, before: &History, addresses: &Addresses) -> Option<NextGroup> {
        let mut members = before.members();
        members.retain(|number| self.left_out.binary_search(number).is_err());
        let mut contacts = Vec::with_capacity(members.len() + self.newcomers.len());
        for &number in &members {
            contacts.push(RankAddress { number, address: *addresses.get(&number)? });
        }
        contacts.extend(self.newcomers.iter().cloned());
        contacts.sort_by_key(|contact| (contact.number != self.leader, contact.number));
        contacts.first().filter(|first| first.number == self.leader)?;
        members.extend(self.newcomers.iter().map(|contact| contact.number));
        let before = before.clone().with_ended(self.ended.clone());
        Some(NextGroup { history: before.with_group(self.number, members), contacts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_ended_is_no_part_of_the_digest_and_all_else_is() {
        let address = |number| (number, ([10, 0, 0, number as u8], 1).into());
        let addresses: Addresses = (0..4).map(address).collect();
        let history = History::first((0..3).collect());
        let known = digest(&history, &addresses);
        let mut other = history.clone();
        other.add_ended([1]);
        assert_eq!(digest(&other, &addresses), known);
        // Rank 3 is in no group.
        assert_eq!(digest(&history, &(0..3).map(address).collect()), known);
        assert_ne!(digest(&history, &(0..2).map(address).collect()), known);
        let moved = addresses.clone().into_iter().chain([(2, ([10, 0, 0, 2], 2).into())]).collect();
        assert_ne!(digest(&history, &moved), known);
        let agreed = history.clone().with_group(1, (0..2).collect());
        let met = agreed.clone().met();
        let all = [known, digest(&agreed, &addresses), digest(&met, &addresses)];
        assert_eq!(BTreeSet::from(all).len(), 3);
    }

    #[test]
    fn a_group_follows_from_the_one_before() {
        let address = |number| (number, ([10, 0, 0, number as u8], 1).into());
        let mut history = History::first((0..5).collect());
        history.add_ended([4]);
        let contact = |(number, address)| RankAddress { number, address };
        let change = GroupChange {
            before: KnowledgeDigest::default(),
            number: 7,
            leader: 2,
            left_out: vec![0, 4],
            newcomers: vec![contact(address(9)), contact(address(1)), contact(address(6))],
            ended: [0].into(),
        };
        let addresses = (0..5).map(address).collect();
        let without = GroupChange { left_out: vec![0, 1, 4], ..change };
        let next = without.apply(&history, &addresses).unwrap();
        let numbers: Vec<_> = next.contacts.iter().map(|contact| contact.number).collect();
        assert_eq!(numbers, [2, 1, 3, 6, 9]);
        let expected = History::first((0..5).collect()).with_ended([0].into());
        assert_eq!(next.history, expected.with_group(7, [1, 2, 3, 6, 9].into()));
        assert!(without.apply(&history, &(0..3).map(address).collect()).is_none());
        let led_by_none = GroupChange { leader: 0, ..without };
        assert!(led_by_none.apply(&history, &addresses).is_none());
    }
}
