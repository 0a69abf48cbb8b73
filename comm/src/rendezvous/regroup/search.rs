//! Search for the remaining ranks of a group, and for their leader.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::findings::{AT_ONCE, Findings, PAUSES, ProbeResult};
use super::message::{LIMIT, RegroupRequest, Reply};
use super::{Attempt, AttemptError, FORM_TIMEOUT, RegroupState};
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{ClientClaim, Credentials, HandshakeStatus, Purpose};
use crate::connection::wire::HandshakeStream;

/// How long a rank may be unresponsive before the others look for another leader. It is less where the time-out is short.
pub(super) const UNRESPONSIVE_AFTER: Duration = Duration::from_secs(5);

/// A rank's search for the others.
pub(super) struct Search<'a> {
    pub(super) endpoint: &'a RegroupState,
    pub(super) deadline: Instant,
    /// From then on, ranks that are missing are not waited for: those that have come still need time to form a group.
    pub(super) last_call: Instant,
    pub(super) findings: Findings,
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
        let probe = RegroupRequest::Probe { number: self.own, generation: self.state().history().newest };
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
        let forming = FORM_TIMEOUT.min(endpoint.config.bounded_timeout() / 4);
        let last_call = deadline.checked_sub(forming).unwrap_or(deadline);
        Self { endpoint, deadline, last_call, findings: Findings::new(blamed) }
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
            let address = |number: usize| Some((number, *state.addresses().get(&number)?));
            state.newest_known().lower_members(self.endpoint.own).filter_map(address).collect::<Vec<_>>()
        };
        let mut pause = PAUSES[0];
        loop {
            self.read_launcher_reports();
            let perhaps = self.findings.perhaps_leads(lower.iter().copied());
            let Some((first, address)) = perhaps.first().copied() else { break };
            let here = self.probe_all(&perhaps, self.answer_deadline())?;
            let lowest = perhaps.iter().find(|(number, _)| !self.findings.is_given_up(*number));
            if let Some(leader) = lowest.filter(|(number, _)| here.contains(number)) {
                return Ok(Some(*leader));
            }
            if Instant::now() >= self.deadline {
                return Err(AttemptError::Again(format!("rank {first} cannot be reached at {address}")));
            }
            if self.findings.is_given_up(first) {
                pause = PAUSES[0];
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSES[1]);
            }
        }
        // Ranks that did not answer may do so in the next attempt.
        self.findings.silent.clear();
        Ok(None)
    }

    /// Probes a rank; returns whether it is there, and records what else the probe shows.
    pub(super) fn look(&mut self, number: usize, address: SocketAddr, until: Instant) -> Attempt<bool> {
        Ok(!self.probe_all(&[(number, address)], until)?.is_empty())
    }

    /// Probes several ranks; returns those that are there.
    fn probe_all(&mut self, ranks: &[(usize, SocketAddr)], until: Instant) -> Attempt<BTreeSet<usize>> {
        let results = self.endpoint.probe_concurrently(ranks, until);
        let results = ranks.iter().map(|(number, _)| *number).zip(results);
        let here = self.findings.record(self.endpoint.own, results);
        self.endpoint.state().add_ended(self.findings.ended().iter().copied());
        here
    }

    fn has_ended(&mut self, number: usize) {
        self.findings.has_ended(number);
        self.endpoint.state().add_ended([number]);
    }

    /// Reads the launchers' reports of processes that have ended.
    pub(super) fn read_launcher_reports(&mut self) {
        let Some(file) = &self.endpoint.ended else { return };
        let ended = read_ended(file);
        if ended.is_empty() {
            return;
        }
        let known = self.endpoint.state().newest_known().all();
        ended.intersection(&known).for_each(|number| self.has_ended(*number));
    }

    /// Probes the missing ranks again, at growing intervals. This rank does not lead where a lower one of the `members`
    /// is there after all.
    pub(super) fn probe_missing(
        &mut self,
        missing: &[(usize, SocketAddr)],
        members: &BTreeSet<usize>,
    ) -> Attempt<()> {
        for some in self.findings.due(missing, Instant::now()).chunks(AT_ONCE) {
            if Instant::now() >= self.last_call {
                break;
            }
            let here = self.probe_all(some, self.missing_deadline())?;
            self.findings.were_probed(some.iter().map(|(number, _)| *number), Instant::now());
            self.findings.check_leads(self.endpoint.own, &here, members)?;
        }
        Ok(())
    }
}
