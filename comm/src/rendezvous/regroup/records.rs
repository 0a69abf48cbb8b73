//! What a rank knows of a job's groups and of the ranks that have come to it, and what follows from that: whom it waits for, and who
//! forms the next group. Without sockets: `C` is a connection.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::super::message::Hello;
use super::super::text::name_ranks;
use super::findings::Findings;
use super::history::History;
use super::knowledge::{Addresses, GroupChange, Knowledge, KnowledgeDigest, NextGroup, RankAddress, digest};
use super::message::{GroupOffer, JoinAttempt, Reply};
use super::{Attempt, AttemptError, excluded};

/// A rank that has come and waits.
#[derive(Debug, Clone)]
pub(super) struct WaitingRank<C> {
    pub(super) contact: RankAddress,
    /// What it knows of the job's groups, and the digest of it; no digest for a newcomer.
    pub(super) history: Arc<History>,
    pub(super) knows: Option<KnowledgeDigest>,
    /// Ranks that it knows to have ended.
    pub(super) ended: BTreeSet<usize>,
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
    change: GroupChange,
    /// What is known of the groups before.
    before: Arc<History>,
    addresses: Arc<Addresses>,
    pub(super) next: NextGroup,
}

impl<C> NewGroup<C> {
    /// Returns the offer to the one that is to be this rank of the group, and knows what has this digest.
    pub(super) fn offer(&self, rank: usize, knows: Option<KnowledgeDigest>) -> GroupOffer {
        let change = self.change.clone();
        let is_known = knows.is_some_and(|digest| digest == change.before);
        let before = (!is_known).then(|| Knowledge::new(&self.before, &self.addresses));
        GroupOffer { rank, change, before }
    }
}

#[derive(Debug, Clone)]
pub(super) struct RegroupRecords<C> {
    /// What this rank knows of the job's groups.
    history: Arc<History>,
    /// Digest of what it knows, once that was needed.
    digest: Option<KnowledgeDigest>,
    /// Ranks that it knows to have ended, beside those of its history.
    ended: BTreeSet<usize>,
    /// The highest number of a group that it has promised to take part in.
    pub(super) promised: u64,
    /// Addresses of all ranks that it knows, by number in the job.
    addresses: Arc<Addresses>,
    /// Members that wait at this listener.
    pub(super) waiting: Vec<WaitingRank<C>>,
    /// Ranks that wait at this listener to become members.
    pub(super) newcomers: Vec<WaitingRank<C>>,
    /// Whether this rank waits at another one's listener.
    pub(super) away: bool,
}

impl<C> Default for RegroupRecords<C> {
    fn default() -> Self {
        Self {
            history: Arc::default(),
            digest: None,
            ended: BTreeSet::new(),
            promised: 0,
            addresses: Arc::default(),
            waiting: Vec::new(),
            newcomers: Vec::new(),
            away: false,
        }
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
        let mut newest = History::clone(self.newest_known());
        newest.add_ended(self.ended.iter().copied());
        for history in self.waiting.iter().map(|peer| &peer.history).chain([&self.history]) {
            newest.add_ended(history.ended().iter().copied());
        }
        self.waiting.iter().for_each(|peer| newest.add_ended(peer.ended.iter().copied()));
        newest
    }

    /// Returns the same, without the proofs of others that ranks have ended.
    pub(super) fn newest_known(&self) -> &Arc<History> {
        let all = self.waiting.iter().map(|peer| &peer.history).chain([&self.history]);
        all.max_by_key(|history| (history.is_known(), history.newest)).unwrap_or(&self.history)
    }

    pub(super) fn history(&self) -> &History {
        &self.history
    }

    pub(super) fn set_history(&mut self, history: History) {
        (self.history, self.digest) = (Arc::new(history), None);
    }

    pub(super) fn add_ended(&mut self, numbers: impl IntoIterator<Item = usize>) {
        self.ended.extend(numbers);
    }

    /// Forgets which ranks of groups before the newest one have ended.
    pub(super) fn forget_ended(&mut self) {
        self.ended.clear();
    }

    pub(super) fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    pub(super) fn forget_addresses(&mut self) {
        (self.addresses, self.digest) = (Arc::default(), None);
    }

    pub(super) fn add_addresses(&mut self, contacts: &[RankAddress]) {
        let is_new = |contact: &&RankAddress| self.addresses.get(&contact.number) != Some(&contact.address);
        let new: Vec<_> = contacts.iter().filter(is_new).map(|new| (new.number, new.address)).collect();
        if !new.is_empty() {
            Arc::make_mut(&mut self.addresses).extend(new);
            self.digest = None;
        }
    }

    /// Returns the digest of what this rank knows.
    pub(super) fn digest(&mut self) -> KnowledgeDigest {
        *self.digest.get_or_insert_with(|| digest(&self.history, &self.addresses))
    }

    /// Returns what this rank knows.
    pub(super) fn knowledge(&self) -> Knowledge {
        Knowledge::new(&self.history, &self.addresses)
    }

    /// Returns with what this rank comes to another one's listener.
    pub(super) fn join_attempt(&mut self, contact: RankAddress, hello: Hello) -> JoinAttempt {
        let ended = self.ended.union(self.history.ended()).copied().collect();
        let (knows, newest) = (self.digest(), self.history.newest);
        JoinAttempt { contact, knows, newest, ended, promised: self.promised, hello }
    }

    /// Returns the history with this digest, where this rank, or one that waits, knows it.
    pub(super) fn history_of(&mut self, knows: KnowledgeDigest) -> Option<Arc<History>> {
        if self.digest() == knows {
            return Some(self.history.clone());
        }
        let peer = self.waiting.iter().find(|peer| peer.knows == Some(knows));
        peer.map(|peer| peer.history.clone())
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
        self.add_addresses(std::slice::from_ref(&peer.contact));
        self.waiting.retain(|other| other.contact.number != peer.contact.number);
        self.waiting.push(peer);
    }

    /// Returns the ranks that count for the next group, have not come, and are not known to have ended; and the members
    /// of the newest group.
    pub(super) fn missing(&self, own: usize) -> (Vec<(usize, SocketAddr)>, BTreeSet<usize>) {
        let history = self.newest();
        let here: BTreeSet<usize> = self.waiting.iter().map(|peer| peer.contact.number).collect();
        let is_here = |number| number == own || here.contains(&number);
        let numbers = history.all().into_iter();
        let missing = numbers.filter(|number| !is_here(*number) && !history.ended().contains(number));
        let known = missing.filter_map(|number| Some((number, *self.addresses.get(&number)?)));
        (known.collect(), history.members())
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
        let is_left_out = |number: &&usize| !here.contains(number);
        let newcomers = waiting.iter().filter(|peer| !before.contains(&peer.contact.number));
        let change = GroupChange {
            before: digest(&history, &self.addresses),
            number,
            leader: own,
            left_out: before.iter().filter(is_left_out).copied().collect(),
            newcomers: newcomers.map(|peer| peer.contact.clone()).collect(),
            ended: history.ended().clone(),
        };
        let unknown = || AttemptError::Again("the address of a member is not known".into());
        let next = change.apply(&history, &self.addresses).ok_or_else(unknown)?;
        let (before, addresses) = (Arc::new(history), self.addresses.clone());
        Ok(NewGroup { waiting, change, before, addresses, next })
    }

    /// Promises to take part in the group that is offered, and in no older one. Returns the group.
    pub(super) fn promise(&mut self, own: usize, offer: GroupOffer) -> Attempt<NextGroup> {
        let GroupOffer { rank, change, before } = offer;
        let number = change.number;
        if number <= self.promised {
            return Err(AttemptError::Again(format!("a group {number} is offered, which is over")));
        }
        let next = match before {
            None if self.digest() == change.before => change.apply(&self.history, &self.addresses),
            None => None,
            Some(Knowledge { history, contacts }) => {
                self.add_addresses(&contacts);
                change.apply(&history, &self.addresses)
            }
        };
        let is_own =
            |next: &NextGroup| rank > 0 && next.contacts.get(rank).is_some_and(|at| at.number == own);
        let Some(next) = next.filter(is_own) else {
            return Err(AttemptError::Again(format!("a group {number} is offered that does not fit")));
        };
        self.promised = number;
        self.add_addresses(&next.contacts);
        Ok(next)
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
