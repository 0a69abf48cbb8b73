//! What a rank has found out about others while it looks for them, and whom it probes next. Without sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use super::{Attempt, AttemptError, excluded};
use crate::connection::connect_error::ConnectError;

/// Shortest and longest pause between two probes of a rank; each pause is twice as long as the one before.
pub(super) const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(250)];
/// How many ranks are probed at the same time, at most: each takes a thread and a socket.
pub(super) const AT_ONCE: usize = 64;
/// For each rank that is silent, so many are probed at the same time in search of the leader: in a large group, all ranks do so.
const FOR_EACH_SILENT: usize = 8;
/// For each rank that is missing, how long a leader waits before it probes those that have not come: they are about to come.
const COMING: Duration = Duration::from_micros(50);
/// Number of attempts in a row after which it is believed that another program is at a listener.
const SETTLED: u32 = 5;

/// Result of a probe of a rank's listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProbeResult {
    Here,
    /// The rank is there; its group has gone on without this rank.
    Excluded,
    /// The rank has ended.
    Gone,
    /// No answer, or none that proves anything.
    Silent,
    /// Another program is there, or a rank of another job.
    Strange {
        on_this_host: bool,
    },
    /// The probe was inconclusive.
    Unsure,
}

impl ProbeResult {
    /// Interprets the failure to reach a rank. Only on this host does it prove anything that nothing listens at its address,
    /// or another program does: between hosts, a firewall refuses, and answers, on behalf of a rank that is alive.
    pub(super) fn of(fault: &ConnectError, on_this_host: bool) -> Self {
        match fault {
            ConnectError::Io(error) if on_this_host && error.kind() == ErrorKind::ConnectionRefused => {
                ProbeResult::Gone
            }
            // The other side has proved to be of this job: the rank has ended, and its port was assigned to another one.
            ConnectError::OtherRank(_) if on_this_host => ProbeResult::Gone,
            // A rank of this job accepts the proof of any other: one that refuses it is of another job.
            ConnectError::BadProof
            | ConnectError::ProofRefused
            | ConnectError::NotOurs
            | ConnectError::Version(_) => ProbeResult::Strange { on_this_host },
            fault if fault.is_out_of_files() => ProbeResult::Unsure,
            ConnectError::TimedOut | ConnectError::Io(_) | ConnectError::OtherRank(_) => ProbeResult::Silent,
            _ => ProbeResult::Unsure,
        }
    }
}

/// Returns whether a rank is gone, unresponsive, or unreachable.
pub(super) fn is_lost(fault: &ConnectError) -> bool {
    ProbeResult::of(fault, false) == ProbeResult::Silent
}

/// What a rank has found out.
#[derive(Debug, Clone, Default)]
pub(super) struct Findings {
    /// Ranks that the caller does not wait for.
    pub(super) blamed: BTreeSet<usize>,
    /// Ranks that are known to have ended.
    gone: BTreeSet<usize>,
    /// Ranks that do not answer.
    pub(super) silent: BTreeSet<usize>,
    /// When each rank that was probed is to be probed again, and the pause after that.
    next_probes: BTreeMap<usize, (Instant, Duration)>,
    /// When those that were not probed yet are to be.
    first_probes: Option<Instant>,
    /// Ranks that were probed since those that had come were last not enough to go on.
    probed: BTreeSet<usize>,
    /// Number of probes in a row at which another program was at a rank's listener.
    strange: BTreeMap<usize, u32>,
}

impl Findings {
    pub(super) fn new(blamed: &[usize]) -> Self {
        Self { blamed: blamed.iter().copied().collect(), ..Self::default() }
    }

    /// Returns whether this rank need not be waited for.
    pub(super) fn is_given_up(&self, number: usize) -> bool {
        self.blamed.contains(&number) || self.silent.contains(&number) || self.gone.contains(&number)
    }

    /// Returns the first ranks of `lower`, from the lowest on, that this rank probes in search of the leader: the lowest that is not
    /// given up. A rank that is there answers at once, and no other one need be asked. Where one was unresponsive, more may be.
    pub(super) fn perhaps_leads<T: Copy>(&self, lower: impl Iterator<Item = (usize, T)>) -> Vec<(usize, T)> {
        let some = (FOR_EACH_SILENT * self.silent.len()).clamp(1, AT_ONCE);
        lower.filter(|(number, _)| !self.is_given_up(*number)).take(some).collect()
    }

    /// Records the results of probes by the rank `own`. Returns the ranks that are there.
    pub(super) fn record(
        &mut self,
        own: usize,
        results: impl IntoIterator<Item = (usize, ProbeResult)>,
    ) -> Attempt<BTreeSet<usize>> {
        let mut here = BTreeSet::new();
        for (number, result) in results {
            let tries = self.strange.remove(&number).unwrap_or_default() + 1;
            match result {
                ProbeResult::Here => {
                    self.silent.remove(&number);
                    here.insert(number);
                }
                ProbeResult::Excluded => return Err(AttemptError::Final(excluded(own))),
                ProbeResult::Silent => drop(self.silent.insert(number)),
                ProbeResult::Strange { .. } if tries < SETTLED => drop(self.strange.insert(number, tries)),
                ProbeResult::Strange { on_this_host: true } | ProbeResult::Gone => self.has_ended(number),
                ProbeResult::Strange { on_this_host: false } => drop(self.silent.insert(number)),
                ProbeResult::Unsure => {}
            }
        }
        Ok(here)
    }

    /// Records that a rank has ended.
    pub(super) fn has_ended(&mut self, number: usize) {
        self.gone.insert(number);
    }

    pub(super) fn ended(&self) -> &BTreeSet<usize> {
        &self.gone
    }

    /// Returns those of the missing ranks that are to be probed again.
    pub(super) fn due<T: Copy>(&mut self, missing: &[(usize, T)], now: Instant) -> Vec<(usize, T)> {
        let first = *self.first_probes.get_or_insert(now + COMING * missing.len() as u32);
        let is_due = |number: &usize| now >= self.next_probes.get(number).map_or(first, |(due, _)| *due);
        missing.iter().copied().filter(|(number, _)| is_due(number)).collect()
    }

    /// Records that these missing ranks were probed, and are to be again after a longer pause.
    pub(super) fn were_probed(&mut self, numbers: impl IntoIterator<Item = usize>, now: Instant) {
        for number in numbers {
            let pause = self.next_probes.get(&number).map_or(PAUSES[0], |(_, pause)| *pause);
            self.probed.insert(number);
            self.next_probes.insert(number, (now + pause, (pause * 2).min(PAUSES[1])));
        }
    }

    /// Fails where a lower one of the `members` is there after all: the rank `own` does not lead then.
    pub(super) fn check_leads(
        &self,
        own: usize,
        here: &BTreeSet<usize>,
        members: &BTreeSet<usize>,
    ) -> Attempt<()> {
        let mut lower = here.range(..own);
        match lower.find(|number| members.contains(number) && !self.blamed.contains(number)) {
            Some(number) => Err(AttemptError::Again(format!("rank {number} leads"))),
            None => Ok(()),
        }
    }

    /// Returns whether a leader has nobody to wait for: all members that may be alive have come or are given up, and all missing
    /// ranks were probed.
    pub(super) fn are_complete<T>(&self, missing: &[(usize, T)], members: &BTreeSet<usize>) -> bool {
        self.awaited(missing, members) == 0 && missing.iter().all(|(number, _)| self.probed.contains(number))
    }

    /// Returns for how many of the missing ranks a leader waits.
    pub(super) fn awaited<T>(&self, missing: &[(usize, T)], members: &BTreeSet<usize>) -> usize {
        let is_awaited = |number: &usize| members.contains(number) && !self.is_given_up(*number);
        missing.iter().filter(|(number, _)| is_awaited(number)).count()
    }

    /// Has all that are missing probed once more, those too that are not waited for: they may have ended since.
    pub(super) fn probe_again(&mut self) {
        self.probed.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_on_this_host_a_refusal_proves_that_a_rank_has_ended() {
        let refused = || ConnectError::Io(ErrorKind::ConnectionRefused.into());
        for (fault, here, elsewhere) in [
            (refused(), ProbeResult::Gone, ProbeResult::Silent),
            (ConnectError::OtherRank(1), ProbeResult::Gone, ProbeResult::Silent),
            (ConnectError::Io(ErrorKind::HostUnreachable.into()), ProbeResult::Silent, ProbeResult::Silent),
            (ConnectError::Io(ErrorKind::PermissionDenied.into()), ProbeResult::Silent, ProbeResult::Silent),
            (ConnectError::TimedOut, ProbeResult::Silent, ProbeResult::Silent),
            (
                ConnectError::NotOurs,
                ProbeResult::Strange { on_this_host: true },
                ProbeResult::Strange { on_this_host: false },
            ),
            (
                ConnectError::ProofRefused,
                ProbeResult::Strange { on_this_host: true },
                ProbeResult::Strange { on_this_host: false },
            ),
        ] {
            assert_eq!(
                [ProbeResult::of(&fault, true), ProbeResult::of(&fault, false)],
                [here, elsewhere],
                "{fault}"
            );
            assert_eq!(is_lost(&fault), elsewhere == ProbeResult::Silent);
        }
    }
}
