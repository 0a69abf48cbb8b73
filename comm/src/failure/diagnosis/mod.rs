//! Choice of the one cause that all ranks report for a failure, from the ranks' reports of what they are doing.

mod chain;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::base::cause::{Cause, NO_ANSWER};
use crate::base::fingerprint::Fingerprint;
use crate::base::last_message::LastMessage;
use crate::transport::tcp::connections::StalledLink;

/// Number of calls that a rank remembers, for comparison with those of ranks that lag behind or run ahead.
const REMEMBERED: usize = 8;
/// Largest number of ranks reported as waited for in one call.
const MOST_WAITS: usize = 64;

/// What one rank is doing, as reported to rank 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Activity {
    /// The latest collectives, the newest last, followed by the point-to-point message called after them, if there is
    /// one.
    calls: Vec<Fingerprint>,
    /// Whether the newest call is still in progress.
    pub(crate) busy: bool,
    /// The ranks that it waits for in that call. Empty until it has waited for a moment.
    #[serde(default)]
    waits: Vec<usize>,
    /// Its calls in progress in other groups of the job.
    #[serde(default)]
    pub(crate) elsewhere: Vec<OtherGroupCall>,
    /// Its connections in this group over which nothing arrives.
    #[serde(default)]
    pub(crate) stalled: Vec<StalledLink>,
    /// The cause of the first failure of a group of the job, as known to this rank. A rank that is in no call is then about
    /// to end.
    #[serde(default)]
    pub(crate) failed: Option<Cause>,
}

/// A call in progress in a group other than the one that asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OtherGroupCall {
    /// Description of the call and its group.
    pub(crate) call: String,
    /// The ranks that it waits for, as ranks of the group that asks.
    pub(crate) waits: Vec<usize>,
}

impl Activity {
    pub(crate) fn begin(&mut self, call: Fingerprint) {
        self.waits.clear();
        // Only the newest message is kept, so that messages do not push out collectives.
        self.calls.pop_if(|call| call.is_message());
        if self.calls.len() == REMEMBERED {
            self.calls.remove(0);
        }
        self.calls.push(call);
        self.busy = true;
    }

    pub(crate) fn end(&mut self) {
        self.busy = false;
        self.waits.clear();
    }

    /// Records the ranks that the current call waits for, replacing earlier ones.
    pub(crate) fn wait_for(&mut self, peers: &mut dyn Iterator<Item = usize>) {
        self.waits.clear();
        self.waits.extend(peers.take(MOST_WAITS));
    }

    /// Returns the ranks that it waits for, in any group.
    pub(crate) fn waits(&self) -> impl Iterator<Item = usize> {
        self.waits.iter().chain(self.elsewhere.iter().flat_map(|call| &call.waits)).copied()
    }

    /// Whether it is in no call of any group.
    fn is_outside(&self) -> bool {
        !self.busy && self.elsewhere.is_empty()
    }

    pub(crate) fn current(&self) -> Option<&Fingerprint> {
        self.calls.last().filter(|_| self.busy)
    }

    fn collectives(&self) -> impl Iterator<Item = &Fingerprint> {
        self.calls.iter().filter(|call| !call.is_message())
    }

    /// Sequence number of the last collective it took part in; 0 for none.
    pub(crate) fn progress(&self) -> u64 {
        self.collectives().map(|call| call.sequence).max().unwrap_or(0)
    }

    fn describe(&self) -> String {
        match (self.current(), self.elsewhere.first(), self.calls.last()) {
            (Some(call), ..) => format!("it is still in {call}"),
            (None, Some(OtherGroupCall { call, .. }), _) => format!("it is still in {call}"),
            (None, None, Some(call)) => format!("it is outside of any operation, {call} was its last"),
            (None, None, None) => "it has not called any operation yet".into(),
        }
    }
}

/// What is known of one rank when a cause is chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Status {
    /// It has answered.
    Active(Activity),
    /// It has closed its group.
    Left,
    /// Its process or connection is gone.
    Died,
    /// It was asked and has not answered.
    Silent,
    /// It could not be asked.
    Unknown,
}

impl Status {
    fn activity(&self) -> Option<&Activity> {
        if let Status::Active(activity) = self { Some(activity) } else { None }
    }
}

/// Why a rank asks for a cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Question {
    /// The stream to `peer` has ended. `left`: the peer had announced that it closes its group. `because`: the cause
    /// that it had reported, if any.
    Lost { peer: usize, left: bool, because: Option<Cause> },
    /// `peer` announced another call.
    Mismatch { peer: usize, mine: Fingerprint, theirs: Fingerprint },
    /// `peer` sent bytes that are no valid announcement.
    Garbage { peer: usize },
    /// Nothing has come from `peer` for a while. `last`: the time-out has passed. `apart`: there is no stream between
    /// the two.
    Stuck { peer: usize, last: bool, apart: bool },
    /// No connection to `peer` could be made, for the reason in `detail`.
    Unreached { peer: usize, detail: String },
    /// Nothing has come from `peer` for a while: which rank would a time-out name? For a warning; the group does not
    /// fail.
    Suspect { peer: usize },
    /// The communication library has failed on the asking rank itself, with the error in `detail`.
    Failed { rank: usize, detail: String },
    /// A call in another group of the job waits for these ranks, or, if `lost`, the first of them is lost there: what
    /// is the cause? This group does not fail.
    Elsewhere { peers: Vec<usize>, lost: bool },
    /// The group of all ranks has found the cause why nothing comes from `peer`.
    Known { peer: usize, cause: Cause },
}

impl Question {
    /// Returns the question after the stream to a rank has ended, with the last message received on it.
    pub(crate) fn lost(peer: usize, words: Option<LastMessage>) -> Self {
        match words {
            Some(LastMessage::Blame(cause)) => Question::Lost { peer, left: false, because: Some(cause) },
            words => Question::Lost { peer, left: words.is_some(), because: None },
        }
    }

    /// Whether a cause found for it fails the whole group. If false, the answer is only for the rank that asks.
    pub(crate) fn is_fatal(&self) -> bool {
        !matches!(self, Question::Suspect { .. } | Question::Elsewhere { .. })
    }

    /// The rank that the question is about.
    pub(crate) fn peer(&self) -> usize {
        match self {
            Question::Lost { peer, .. }
            | Question::Mismatch { peer, .. }
            | Question::Garbage { peer }
            | Question::Stuck { peer, .. }
            | Question::Unreached { peer, .. }
            | Question::Failed { rank: peer, .. }
            | Question::Known { peer, .. }
            | Question::Suspect { peer } => *peer,
            Question::Elsewhere { peers, .. } => peers.first().copied().unwrap_or(usize::MAX),
        }
    }
}

/// Returns the cause that the statuses of all ranks show, if they show one. `asker` is the rank that asks.
pub(crate) fn choose_cause(asker: usize, question: &Question, statuses: &[Status]) -> Option<Cause> {
    // A dead rank explains everything else.
    if let Some(rank) = statuses.iter().position(|status| *status == Status::Died) {
        return Some(Cause::Died { rank });
    }
    match question {
        Question::Lost { because: Some(cause), .. } | Question::Known { cause, .. } => Some(cause.clone()),
        Question::Lost { peer, left, .. } => Some(match statuses.get(*peer) {
            Some(Status::Left) => Cause::Left { rank: *peer },
            _ if *left => Cause::Left { rank: *peer },
            _ => Cause::Died { rank: *peer },
        }),
        Question::Garbage { peer } => {
            Some(Cause::Protocol { rank: *peer, detail: "it sent bytes that announce no call".into() })
        }
        Question::Suspect { peer } => Some(slowest_rank(asker, *peer, statuses)),
        Question::Elsewhere { peers, lost: false } => chain::cause_at_end(asker, peers, statuses),
        Question::Elsewhere { peers, lost: true } => {
            let left = peers.first().filter(|peer| statuses.get(**peer) == Some(&Status::Left));
            left.map(|peer| Cause::Left { rank: *peer })
        }
        Question::Failed { rank, detail } => Some(Cause::Failed { rank: *rank, detail: detail.clone() }),
        Question::Unreached { peer, detail } => Some(unreached(asker, *peer, detail, statuses)),
        Question::Mismatch { peer, mine, theirs } => Some(mismatch(asker, mine, *peer, theirs, statuses)),
        Question::Stuck { peer, last, apart } => disagreement(statuses).or_else(|| {
            // If there is a stream, what the peer sent before it left may still arrive, followed by the end of the
            // stream.
            if statuses.get(*peer) == Some(&Status::Left) && (*apart || *last) {
                Some(Cause::Left { rank: *peer })
            } else if *last {
                Some(if is_hung(statuses) { Cause::Hung } else { slowest_rank(asker, *peer, statuses) })
            } else {
                None
            }
        }),
    }
}

/// Whether all ranks are in the same call of a communication library (NCCL, MPI). Then none of them is to blame.
fn is_hung(statuses: &[Status]) -> bool {
    let current = |status: &Status| status.activity().and_then(Activity::current).copied();
    let first = statuses.first().and_then(current).filter(|call| call.is_carried() && !call.is_message());
    first.is_some() && statuses.iter().all(|status| current(status) == first)
}

/// Returns the cause when `asker` cannot connect to `peer`: `peer` has closed its group or does not answer, ranks
/// disagree about the call, or the network between the two is at fault.
fn unreached(asker: usize, peer: usize, detail: &str, statuses: &[Status]) -> Cause {
    match statuses.get(peer) {
        // Where nobody can be asked: the two have met before, so that the peer has more likely left than become
        // unreachable.
        Some(Status::Left | Status::Unknown) => Cause::Left { rank: peer },
        Some(Status::Silent) => Cause::Stalled { rank: peer, detail: NO_ANSWER.into() },
        _ => disagreement(statuses).unwrap_or_else(|| Cause::Unreachable {
            rank: peer,
            by: asker,
            detail: detail.into(),
        }),
    }
}

/// Returns the mismatch cause: a rank whose call differs from that of another, and the collective that both should have
/// called.
fn mismatch(
    asker: usize,
    mine: &Fingerprint,
    peer: usize,
    theirs: &Fingerprint,
    statuses: &[Status],
) -> Cause {
    if !mine.is_message()
        && !theirs.is_message()
        && let Some(cause) = disagreement(statuses)
    {
        return cause;
    }
    let ((low, low_call), (high, high_call)) =
        if asker < peer { ((asker, *mine), (peer, *theirs)) } else { ((peer, *theirs), (asker, *mine)) };
    // If more than one rank has made the other call, the message is the odd one.
    if low_call.is_message() && votes(&high_call, statuses) > 1 {
        return Cause::Mismatch { odd_rank: low, odd: low_call, rank: high, call: high_call };
    }
    Cause::Mismatch { odd_rank: high, odd: high_call, rank: low, call: low_call }
}

/// Finds the lowest sequence number at which ranks have called different collectives, whether or not those ranks have
/// communicated with each other. The odd rank is one whose call the fewest ranks have made; in a tie, not the lowest
/// rank.
fn disagreement(statuses: &[Status]) -> Option<Cause> {
    let mut places: BTreeMap<u64, Vec<(usize, &Fingerprint)>> = BTreeMap::new();
    for (rank, activity) in statuses.iter().enumerate().filter_map(|(rank, s)| Some((rank, s.activity()?))) {
        for call in activity.collectives() {
            places.entry(call.sequence).or_default().push((rank, call));
        }
    }
    let here = places.into_values().find(|here| here.iter().any(|(_, call)| *call != here[0].1))?;
    // Each different call once, with the lowest rank that made it and the number of ranks that did.
    let mut calls: Vec<(usize, &Fingerprint, usize)> = Vec::new();
    for (rank, call) in here {
        match calls.iter_mut().find(|(_, known, _)| *known == call) {
            Some((.., votes)) => *votes += 1,
            None => calls.push((rank, call, 1)),
        }
    }
    calls.sort_by_key(|(rank, _, votes)| (std::cmp::Reverse(*votes), *rank));
    let (usual, odd) = (calls.first()?, calls.last()?);
    Some(Cause::Mismatch { odd_rank: odd.0, odd: *odd.1, rank: usual.0, call: *usual.1 })
}

/// Returns the number of ranks that have made this collective call.
fn votes(call: &Fingerprint, statuses: &[Status]) -> usize {
    let made = |activity: &Activity| activity.collectives().any(|made| made == call);
    statuses.iter().filter_map(Status::activity).filter(|activity| made(activity)).count()
}

/// Returns whether the verdict may still change, because ranks that have not reached the call in question can turn the
/// majority.
pub(crate) fn may_change(cause: &Cause, statuses: &[Status]) -> bool {
    let Cause::Mismatch { odd, call, .. } = cause else { return false };
    if odd.is_message() || call.is_message() {
        return false;
    }
    let absent = |activity: &&Activity| activity.progress() < call.sequence;
    let absent = statuses.iter().filter_map(Status::activity).filter(absent).count();
    absent > 0 && votes(call, statuses) <= votes(odd, statuses) + absent
}

/// Returns what the others wait for: a rank that does not answer, else a connection that stands still, else the rank at the end of the chain of ranks
/// that wait for each other, else the one that is furthest behind.
fn slowest_rank(asker: usize, peer: usize, statuses: &[Status]) -> Cause {
    if let Some(rank) = statuses.iter().position(|status| *status == Status::Silent) {
        return Cause::Stalled { rank, detail: NO_ANSWER.into() };
    }
    if let Some(cause) = stalled_link(statuses) {
        return cause;
    }
    if let Some(cause) = chain::cause_at_end(asker, &waits_of(asker, peer, statuses), statuses) {
        return cause;
    }
    let in_collective = |rank: usize| match &statuses[rank] {
        Status::Active(activity) => activity.current().is_none_or(|call| !call.is_message()),
        _ => false,
    };
    let progress = |rank: usize| match &statuses[rank] {
        // Within one call, a rank that is not in it, or no longer, counts as behind those that wait in it.
        Status::Active(activity) => (activity.progress(), activity.busy),
        _ => (u64::MAX, true),
    };
    let everyone = 0..statuses.len();
    let rank = match everyone.filter(|rank| *rank != asker).min_by_key(|rank| progress(*rank)) {
        Some(rank) if in_collective(asker) && progress(rank) < progress(asker) => rank,
        _ => peer,
    };
    let detail = match &statuses[rank] {
        Status::Active(activity) if is_sending(asker, statuses) && is_sending(rank, statuses) => {
            let doing = activity.describe();
            format!(
                "{doing}, and both send: ranks that send to each other put send and recv into one `batch`"
            )
        }
        Status::Active(activity) => activity.describe(),
        Status::Unknown => "nobody can ask what it does, because rank 0 has left".into(),
        _ => "it gave no sign of what it does".into(),
    };
    Cause::Stalled { rank, detail }
}

/// Returns the connection that has been standing still for longest: its ranks, and those that wait for them, are not to
/// blame.
fn stalled_link(statuses: &[Status]) -> Option<Cause> {
    let active = statuses.iter().enumerate().filter_map(|(from, status)| Some((from, status.activity()?)));
    let links = active.flat_map(|(from, activity)| activity.stalled.iter().map(move |link| (from, link)));
    let (from, link) = links.max_by_key(|(from, link)| (link.silence_ms, std::cmp::Reverse(*from)))?;
    Some(Cause::Link { from, to: link.peer, detail: link.detail.clone() })
}

/// Whether a rank is in a message that it sends.
fn is_sending(rank: usize, statuses: &[Status]) -> bool {
    let call = statuses.get(rank).and_then(Status::activity).and_then(Activity::current);
    call.is_some_and(|call| call.is_message() && call.root == Some(rank as u32))
}

/// Returns the ranks that `asker` waits for. If `peer`, about which it asks, is not among the reported ones, only
/// `peer`.
fn waits_of(asker: usize, peer: usize, statuses: &[Status]) -> Vec<usize> {
    let known = statuses.get(asker).and_then(Status::activity).map(|activity| activity.waits.clone());
    known.filter(|waits| waits.contains(&peer)).unwrap_or_else(|| vec![peer])
}

#[cfg(test)]
mod tests;
