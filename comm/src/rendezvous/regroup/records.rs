//! What a rank knows of a job's groups and of the ranks that have come to it, and what follows from that: whom it waits for, and who
//! forms the next group. Without sockets: `C` is a connection.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use super::super::message::Hello;
use super::super::text::name_ranks;
use super::findings::Findings;
use super::history::History;
use super::message::{RankAddress, Reply};
use super::search::excluded;
use super::{Attempt, AttemptError};

/// A rank that has come and waits.
#[derive(Debug)]
pub(super) struct WaitingRank<C> {
    pub(super) contact: RankAddress,
    pub(super) history: History,
    pub(super) promised: u64,
    pub(super) hello: Hello,
    /// The address from which it came.
    pub(super) from: IpAddr,
    pub(super) wire: C,
}

/// The members of a new group, without this rank.
pub(super) struct NewGroup<C> {
    /// In the order of their numbers in the job.
    pub(super) waiting: Vec<WaitingRank<C>>,
    /// History of all ranks that agree to the new group.
    pub(super) history: History,
}

#[derive(Debug)]
pub(super) struct RegroupRecords<C> {
    /// What this rank knows of the job's groups.
    pub(super) history: History,
    /// The highest number of a group that it has promised to take part in.
    pub(super) promised: u64,
    /// Addresses of all ranks that it knows, by number in the job.
    pub(super) addresses: BTreeMap<usize, SocketAddr>,
    /// Members that wait at this listener.
    pub(super) waiting: Vec<WaitingRank<C>>,
    /// Ranks that wait at this listener to become members.
    pub(super) newcomers: Vec<WaitingRank<C>>,
    /// Whether this rank waits at another one's listener.
    pub(super) away: bool,
}

impl<C> Default for RegroupRecords<C> {
    fn default() -> Self {
        let (history, addresses) = (History::default(), BTreeMap::new());
        Self { history, promised: 0, addresses, waiting: Vec::new(), newcomers: Vec::new(), away: false }
    }
}

impl<C> RegroupRecords<C> {
    /// Returns whether another process has this number. A member that has missed the start of its group asks again from
    /// the same listener.
    pub(super) fn has_another(&self, contact: &RankAddress) -> bool {
        self.addresses.get(&contact.number).is_some_and(|address| *address != contact.address)
    }

    /// Returns the newest history of this rank and of those that wait: a rank of a newer group knows better who is in it. One
    /// proof that a rank has ended is enough for all.
    pub(super) fn newest(&self) -> History {
        let all = || self.waiting.iter().map(|peer| &peer.history).chain([&self.history]);
        let newest = all().max_by_key(|history| (history.is_known(), history.newest));
        let mut newest = newest.cloned().unwrap_or_default();
        all().for_each(|history| newest.add_ended(history.ended().iter().copied()));
        newest
    }

    pub(super) fn add_addresses(&mut self, contacts: &[RankAddress]) {
        self.addresses.extend(contacts.iter().map(|contact| (contact.number, contact.address)));
    }

    /// Returns number and address of all ranks that count for the next group, except those for which `are_not` is true.
    pub(super) fn relevant_ranks(
        &self,
        history: &History,
        are_not: impl Fn(usize) -> bool,
    ) -> Vec<RankAddress> {
        let numbers = history.all().into_iter().filter(|number| !are_not(*number));
        numbers
            .filter_map(|number| Some(RankAddress { number, address: *self.addresses.get(&number)? }))
            .collect()
    }

    /// Returns whether the newest group that this rank has met in has gone on without rank `number`, which knows of no
    /// group newer than `newest`. False as long as this rank does not know who is in the first group.
    pub(super) fn excludes(&self, number: usize, newest: u64) -> bool {
        self.history.is_known() && newest <= self.history.met && !self.history.has_met_with(number)
    }

    /// Returns why a rank that knows of no group newer than `newest` cannot wait at this listener for the next group.
    pub(super) fn sends_away(&self, number: usize, newest: u64) -> Option<Reply> {
        match () {
            () if self.excludes(number, newest) => Some(Reply::Excluded),
            () if self.away => Some(Reply::Elsewhere),
            () => None,
        }
    }

    /// Lets a member wait. One that comes again has given up the first time.
    pub(super) fn add_waiting(&mut self, peer: WaitingRank<C>) {
        self.waiting.retain(|other| other.contact.number != peer.contact.number);
        self.waiting.push(peer);
    }

    /// Returns the ranks that count for the next group, have not come, and are not known to have ended; and the members
    /// of the newest group.
    pub(super) fn missing(&self, own: usize) -> (Vec<(usize, SocketAddr)>, BTreeSet<usize>) {
        let history = self.newest();
        let here: BTreeSet<usize> = self.waiting.iter().map(|peer| peer.contact.number).collect();
        let is_here = |number| number == own || here.contains(&number);
        let contacts =
            self.relevant_ranks(&history, |number| is_here(number) || history.ended().contains(&number));
        (contacts.into_iter().map(|contact| (contact.number, contact.address)).collect(), history.members())
    }

    /// Chooses the members of the new group that this rank, `own`, leads, if they may go on without the others; newcomers are
    /// members as far as the group has no more than `room` ranks with them.
    pub(super) fn choose(
        &mut self,
        own: usize,
        findings: &mut Findings,
        room: usize,
    ) -> Attempt<NewGroup<C>> {
        let history = self.newest();
        let before = history.members();
        if !before.contains(&own) {
            return Err(AttemptError::Final(excluded(own)));
        }
        let is_member = |peer: &WaitingRank<C>| {
            let number = peer.contact.number;
            before.contains(&number) && !findings.blamed.contains(&number)
        };
        let waiting = self.waiting.iter().filter(|peer| is_member(peer));
        let here: BTreeSet<usize> = waiting.map(|peer| peer.contact.number).chain([own]).collect();
        if !history.may_form(&here) {
            findings.probe_again();
            return Err(AttemptError::Again(not_enough_description(&history, &here)));
        }
        let (mut waiting, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|peer| is_member(peer));
        self.waiting = others;
        for peer in std::mem::take(&mut self.newcomers) {
            let number = peer.contact.number;
            let is_new =
                !before.contains(&number) && waiting.iter().all(|other| other.contact.number != number);
            match waiting.len() + 1 < room && is_new {
                true => waiting.push(peer),
                false => self.newcomers.push(peer),
            }
        }
        waiting.sort_by_key(|peer| peer.contact.number);
        let promised = waiting.iter().map(|peer| peer.promised).fold(self.promised, u64::max);
        let number = promised.max(history.newest) + 1;
        self.promised = number;
        let members = waiting.iter().map(|peer| peer.contact.number).chain([own]).collect();
        Ok(NewGroup { waiting, history: history.with_group(number, members) })
    }

    /// Promises to take part in the group with this number, and in no older one.
    pub(super) fn promise(&mut self, number: u64) -> Attempt<()> {
        if number <= self.promised {
            return Err(AttemptError::Again(format!("a group {number} is offered, which is over")));
        }
        self.promised = number;
        Ok(())
    }
}

/// Describes why the ranks that are here may not go on.
fn not_enough_description(history: &History, here: &BTreeSet<usize>) -> String {
    let missing = history.all().into_iter().filter(|n| !here.contains(n) && !history.ended().contains(n));
    match missing.collect::<Vec<_>>().as_slice() {
        [] => "the ranks that were there before newcomers came have ended, and have left others behind that may still be \
               there"
            .into(),
        missing => format!(
            "{} may still be there and did not come, and those who did are not enough to go on without",
            name_ranks(missing)
        ),
    }
}
