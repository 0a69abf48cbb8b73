//! Search for the remaining ranks of a group, and for their leader.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::message::{LIMIT, RegroupRequest, Reply};
use super::{Attempt, AttemptError, FORM_TIMEOUT, RegroupState};
use crate::Error;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{ClientClaim, Credentials, HandshakeStatus, Purpose};
use crate::connection::wire::HandshakeStream;

/// How long a rank may be unresponsive before the others look for another leader. It is less where the time-out is short.
const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(5);
/// Shortest and longest pause between two probes of a rank; each pause is twice as long as the one before.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(250)];

/// How many ranks are probed at the same time, at most: each takes a thread and a socket.
const AT_ONCE: usize = 64;
/// Number of attempts in a row after which it is believed that another program is at a listener.
const SETTLED: u32 = 5;

/// What one rank finds out about the others while it looks for them.
pub(super) struct Search<'a> {
    pub(super) endpoint: &'a RegroupState,
    pub(super) deadline: Instant,
    /// From then on, ranks that are missing are not waited for: those that have come still need time to form a group.
    pub(super) last_call: Instant,
    /// Ranks that the caller does not wait for.
    pub(super) blamed: BTreeSet<usize>,
    /// Ranks that are known to have ended.
    gone: BTreeSet<usize>,
    /// Ranks that do not answer.
    pub(super) silent: BTreeSet<usize>,
    /// When each rank that was probed is to be probed again, and the pause after that.
    next_probes: BTreeMap<usize, (Instant, Duration)>,
    /// Ranks that were probed since those that had come were last not enough to go on.
    probed: BTreeSet<usize>,
    /// Number of probes in a row at which another program was at a rank's listener.
    strange: BTreeMap<usize, u32>,
}

/// Result of a probe of a rank's listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProbeResult {
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
    fn of(fault: &ConnectError, on_this_host: bool) -> Self {
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

/// Reads which ranks' processes a launcher has seen end: one number on each complete line.
fn read_ended(file: &Path) -> BTreeSet<usize> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Connects to a listener and sends `message`. `expected`: number of the rank whose listener it is, where known.
pub(super) fn connect(
    address: SocketAddr,
    expected: Option<usize>,
    (credentials, own): (&Credentials, u32),
    message: &RegroupRequest,
    deadline: Instant,
) -> ConnectResult<HandshakeStream> {
    let caller = ClientClaim { rank: own, world_size: 0, purpose: Purpose::Regroup };
    let (mut wire, verdict) = HandshakeStream::connect(address, credentials, caller, deadline)?;
    if expected.is_some_and(|number| number as u32 != verdict.rank) {
        return Err(ConnectError::OtherRank(verdict.rank));
    }
    match verdict.status {
        HandshakeStatus::Admitted => wire.send(message, deadline).map(|()| wire),
        _ => Err(ConnectError::NotAwaited),
    }
}

impl RegroupState {
    pub(super) fn silence(&self) -> Duration {
        UNRESPONSIVE_AFTER.min(self.config.bounded_timeout() / 4)
    }

    /// Returns whether this address is one of this host.
    fn is_on_this_host(&self, address: SocketAddr) -> bool {
        let ip = address.ip().to_canonical();
        ip.is_loopback() || ip == self.address.ip().to_canonical()
    }

    /// Probes a rank's listener.
    fn probe(&self, (number, address): (usize, SocketAddr), until: Instant) -> ProbeResult {
        let probe = RegroupRequest::Probe { number: self.own, generation: self.state().history.newest };
        let own = (&self.credentials, self.own as u32);
        match connect(address, Some(number), own, &probe, until) {
            Ok(mut wire) => match wire.receive(LIMIT, until) {
                Ok(Reply::Here) => ProbeResult::Here,
                Ok(Reply::Excluded) => ProbeResult::Excluded,
                Err(ConnectError::TimedOut) => ProbeResult::Silent,
                _ => ProbeResult::Unsure,
            },
            Err(fault) => ProbeResult::of(&fault, self.is_on_this_host(address)),
        }
    }

    /// Probes several addresses at the same time: unresponsive ranks take no longer than one of them.
    fn probe_concurrently(&self, ranks: &[(usize, SocketAddr)], until: Instant) -> Vec<ProbeResult> {
        if let [rank] = ranks {
            return vec![self.probe(*rank, until)];
        }
        std::thread::scope(|scope| {
            let start = |rank: &(usize, SocketAddr)| {
                let rank = *rank;
                Builder::new().spawn_scoped(scope, move || self.probe(rank, until))
            };
            let probes: Vec<_> = ranks.iter().map(start).collect();
            let results = probes.into_iter().zip(ranks).map(|(probe, rank)| match probe {
                Ok(thread) => thread.join().unwrap_or(ProbeResult::Unsure),
                // No thread could be started, and there may be no time left.
                Err(_) if Instant::now() >= until => ProbeResult::Unsure,
                Err(_) => self.probe(*rank, until),
            });
            results.collect()
        })
    }
}

impl<'a> Search<'a> {
    pub(super) fn new(endpoint: &'a RegroupState, blamed: &[usize], deadline: Instant) -> Self {
        let blamed = blamed.iter().copied().collect();
        let (gone, silent, probed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let (next_probes, strange) = (BTreeMap::new(), BTreeMap::new());
        let forming = FORM_TIMEOUT.min(endpoint.config.bounded_timeout() / 4);
        let last_call = deadline.checked_sub(forming).unwrap_or(deadline);
        Self { endpoint, deadline, last_call, blamed, gone, silent, next_probes, probed, strange }
    }

    /// Returns how long to wait for the answer of a leader.
    pub(super) fn answer_deadline(&self) -> Instant {
        self.deadline.min(Instant::now() + self.endpoint.silence())
    }

    /// Returns until when to wait for the answer of a rank that is missing: the last call is not delayed by it.
    fn missing_deadline(&self) -> Instant {
        let until = self.answer_deadline();
        if Instant::now() < self.last_call { until.min(self.last_call) } else { until }
    }

    /// Returns the lowest rank that is there, with its listener; `None` where that is this one.
    pub(super) fn find_leader(&mut self) -> Attempt<Option<(usize, SocketAddr)>> {
        let lower = {
            let state = self.endpoint.state();
            let members = state.newest().members();
            let address = |number: &usize| Some((*number, *state.addresses.get(number)?));
            members.range(..self.endpoint.own).filter_map(address).collect::<Vec<_>>()
        };
        let mut pause = PAUSES[0];
        loop {
            self.read_launcher_reports();
            let perhaps: Vec<_> =
                lower.iter().copied().filter(|(number, _)| !self.is_given_up(*number)).collect();
            let Some((first, address)) = perhaps.first().copied() else { break };
            // A rank that is there answers at once, and no other one need be asked. Where one was unresponsive, more may
            // be.
            let some = if self.silent.is_empty() { 1 } else { AT_ONCE.min(perhaps.len()) };
            let here = self.probe_all(&perhaps[..some], self.answer_deadline())?;
            let lowest = perhaps.iter().find(|(number, _)| !self.is_given_up(*number));
            if let Some(leader) = lowest.filter(|(number, _)| here.contains(number)) {
                return Ok(Some(*leader));
            }
            if Instant::now() >= self.deadline {
                return Err(AttemptError::Again(format!("rank {first} cannot be reached at {address}")));
            }
            if self.is_given_up(first) {
                pause = PAUSES[0];
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSES[1]);
            }
        }
        // Ranks that did not answer may do so in the next attempt.
        self.silent.clear();
        Ok(None)
    }

    /// Probes a rank; returns whether it is there, and records what else the probe shows.
    pub(super) fn look(&mut self, number: usize, address: SocketAddr, until: Instant) -> Attempt<bool> {
        Ok(!self.probe_all(&[(number, address)], until)?.is_empty())
    }

    /// Probes several ranks; returns those that are there.
    fn probe_all(&mut self, ranks: &[(usize, SocketAddr)], until: Instant) -> Attempt<BTreeSet<usize>> {
        let results = self.endpoint.probe_concurrently(ranks, until);
        let mut here = BTreeSet::new();
        for (&(number, _), result) in ranks.iter().zip(results) {
            let tries = self.strange.remove(&number).unwrap_or_default() + 1;
            match result {
                ProbeResult::Here => {
                    self.silent.remove(&number);
                    here.insert(number);
                }
                ProbeResult::Excluded => return Err(AttemptError::Final(excluded(self.endpoint.own))),
                ProbeResult::Silent => drop(self.silent.insert(number)),
                ProbeResult::Strange { .. } if tries < SETTLED => drop(self.strange.insert(number, tries)),
                ProbeResult::Strange { on_this_host: true } | ProbeResult::Gone => self.has_ended(number),
                ProbeResult::Strange { on_this_host: false } => drop(self.silent.insert(number)),
                ProbeResult::Unsure => {}
            }
        }
        Ok(here)
    }

    fn has_ended(&mut self, number: usize) {
        self.gone.insert(number);
        self.endpoint.state().history.add_ended([number]);
    }

    /// Reads the launchers' reports of processes that have ended.
    pub(super) fn read_launcher_reports(&mut self) {
        let Some(file) = &self.endpoint.ended else { return };
        let ended = read_ended(file);
        if ended.is_empty() {
            return;
        }
        let known = self.endpoint.state().newest().all();
        ended.intersection(&known).for_each(|number| self.has_ended(*number));
    }

    /// Probes the missing ranks again, at growing intervals. This rank does not lead where a lower one of the `members`
    /// is there after all.
    pub(super) fn probe_missing(
        &mut self,
        missing: &[(usize, SocketAddr)],
        members: &BTreeSet<usize>,
    ) -> Attempt<()> {
        let now = Instant::now();
        let is_due = |number: &usize| self.next_probes.get(number).is_none_or(|(due, _)| now >= *due);
        let due: Vec<_> = missing.iter().copied().filter(|(number, _)| is_due(number)).collect();
        for some in due.chunks(AT_ONCE) {
            if Instant::now() >= self.last_call {
                break;
            }
            let here = self.probe_all(some, self.missing_deadline())?;
            for (number, _) in some {
                let pause = self.next_probes.get(number).map_or(PAUSES[0], |(_, pause)| *pause);
                self.probed.insert(*number);
                self.next_probes.insert(*number, (Instant::now() + pause, (pause * 2).min(PAUSES[1])));
            }
            let leads = |number: &&usize| {
                **number < self.endpoint.own && members.contains(number) && !self.blamed.contains(number)
            };
            if let Some(number) = here.iter().find(leads) {
                return Err(AttemptError::Again(format!("rank {number} leads")));
            }
        }
        Ok(())
    }
}

impl Search<'_> {
    /// Returns whether this rank need not be waited for.
    pub(super) fn is_given_up(&self, number: usize) -> bool {
        self.blamed.contains(&number) || self.silent.contains(&number) || self.gone.contains(&number)
    }

    /// Returns whether each of them was probed.
    pub(super) fn has_probed(&self, missing: &[(usize, SocketAddr)]) -> bool {
        missing.iter().all(|(number, _)| self.probed.contains(number))
    }

    /// Has all that are missing probed once more, those too that are not waited for: they may have ended since.
    pub(super) fn probe_again(&mut self) {
        self.probed.clear();
    }
}

pub(super) fn excluded(rank: usize) -> Error {
    Error::Excluded { rank }
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
