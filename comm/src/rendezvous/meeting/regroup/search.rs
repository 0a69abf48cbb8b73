//! Search for the remaining ranks of a group, and for their leader.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::message::{Knock, LIMIT, Reply};
use super::{Attempt, FORMING, Hall, Miss};
use crate::Error;
use crate::rendezvous::connection::fault::{Fault, Try};
use crate::rendezvous::connection::handshake::{Caller, Credentials, Purpose, Status};
use crate::rendezvous::connection::wire::Wire;

/// How long a rank may be unresponsive before the others look for another leader. It is less where the time-out is short.
const SILENCE: Duration = Duration::from_secs(5);
/// Shortest and longest pause between two probes of a rank; each pause is twice as long as the one before.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(250)];

/// How many ranks are probed at the same time, at most: each takes a thread and a socket.
const AT_ONCE: usize = 64;
/// Number of attempts in a row after which it is believed that another program is at a door.
const SETTLED: u32 = 5;

/// What one rank finds out about the others while it looks for them.
pub(super) struct Search<'a> {
    pub(super) lobby: &'a Hall,
    pub(super) deadline: Instant,
    /// From then on, ranks that are missing are not waited for: those that have come still need time to form a group.
    pub(super) last_call: Instant,
    /// Ranks that the caller does not wait for.
    pub(super) blamed: BTreeSet<usize>,
    /// Ranks that are known to have ended.
    gone: BTreeSet<usize>,
    /// Ranks that do not answer.
    pub(super) silent: BTreeSet<usize>,
    looks: BTreeMap<usize, (Instant, Duration)>,
    /// Number of probes in a row at which another program was at a rank's door.
    strange: BTreeMap<usize, u32>,
}

/// Result of a probe of a rank's door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    Here,
    /// The rank is there; its group has gone on without this rank.
    Excluded,
    /// The rank has ended.
    Gone,
    /// No answer, or none that proves anything.
    Silent,
    /// Another program is there, or one that has rejected this rank's proof.
    Strange {
        on_this_host: bool,
    },
    /// The probe was inconclusive.
    Unsure,
}

impl Sight {
    /// Interprets the failure to reach a rank. Only on this host does it prove anything that nothing listens at its door,
    /// or another program does: between hosts, a firewall refuses, and answers, on behalf of a rank that is alive.
    fn of(fault: &Fault, on_this_host: bool) -> Self {
        match fault {
            Fault::Io(error) if on_this_host && error.kind() == ErrorKind::ConnectionRefused => Sight::Gone,
            // The other side has proved to be of this job: the rank has ended, and its port was assigned to another one.
            Fault::OtherRank(_) if on_this_host => Sight::Gone,
            Fault::BadProof | Fault::NotOurs | Fault::Version(_) => Sight::Strange { on_this_host },
            // A rank that has too many callers may close the connection at this point.
            Fault::ProofRefused => Sight::Strange { on_this_host: false },
            fault if fault.is_exhausted() => Sight::Unsure,
            Fault::TimedOut | Fault::Io(_) | Fault::OtherRank(_) => Sight::Silent,
            _ => Sight::Unsure,
        }
    }
}

/// Returns whether a rank is gone, unresponsive, or unreachable.
pub(super) fn is_lost(fault: &Fault) -> bool {
    Sight::of(fault, false) == Sight::Silent
}

/// Reads which ranks' processes a launcher has seen end: one number on each complete line.
fn read_ended(file: &Path) -> BTreeSet<usize> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Connects to a door and sends `message`. `expected`: number of the rank whose door it is, where known.
pub(super) fn knock(
    address: SocketAddr,
    expected: Option<usize>,
    (credentials, own): (&Credentials, u32),
    message: &Knock,
    deadline: Instant,
) -> Try<Wire> {
    let caller = Caller { rank: own, world_size: 0, purpose: Purpose::Door };
    let (mut wire, verdict) = Wire::connect(address, credentials, caller, deadline)?;
    if expected.is_some_and(|number| number as u32 != verdict.rank) {
        return Err(Fault::OtherRank(verdict.rank));
    }
    match verdict.status {
        Status::Admitted => wire.send(message, deadline).map(|()| wire),
        _ => Err(Fault::NotAwaited),
    }
}

impl Hall {
    pub(super) fn silence(&self) -> Duration {
        SILENCE.min(self.config.bounded_timeout() / 4)
    }

    /// Returns whether this address is one of this host.
    fn is_on_this_host(&self, door: SocketAddr) -> bool {
        let ip = door.ip().to_canonical();
        ip.is_loopback() || ip == self.door.ip().to_canonical()
    }

    /// Probes a rank's door.
    fn look(&self, (number, door): (usize, SocketAddr), until: Instant) -> Sight {
        let probe = Knock::Probe { number: self.own, generation: self.state().history.newest };
        let own = (&self.credentials, self.own as u32);
        match knock(door, Some(number), own, &probe, until) {
            Ok(mut wire) => match wire.receive(LIMIT, until) {
                Ok(Reply::Here) => Sight::Here,
                Ok(Reply::Excluded) => Sight::Excluded,
                Err(Fault::TimedOut) => Sight::Silent,
                _ => Sight::Unsure,
            },
            Err(fault) => Sight::of(&fault, self.is_on_this_host(door)),
        }
    }

    /// Probes several doors at the same time: unresponsive ranks take no longer than one of them.
    fn look_at_once(&self, ranks: &[(usize, SocketAddr)], until: Instant) -> Vec<Sight> {
        if let [rank] = ranks {
            return vec![self.look(*rank, until)];
        }
        std::thread::scope(|scope| {
            let start = |rank: &(usize, SocketAddr)| {
                let rank = *rank;
                Builder::new().spawn_scoped(scope, move || self.look(rank, until))
            };
            let looks: Vec<_> = ranks.iter().map(start).collect();
            let sights = looks.into_iter().zip(ranks).map(|(look, rank)| match look {
                Ok(thread) => thread.join().unwrap_or(Sight::Unsure),
                // No thread could be started, and there may be no time left.
                Err(_) if Instant::now() >= until => Sight::Unsure,
                Err(_) => self.look(*rank, until),
            });
            sights.collect()
        })
    }
}

impl<'a> Search<'a> {
    pub(super) fn new(lobby: &'a Hall, blamed: &[usize], deadline: Instant) -> Self {
        let blamed = blamed.iter().copied().collect();
        let (gone, silent) = (BTreeSet::new(), BTreeSet::new());
        let (looks, strange) = (BTreeMap::new(), BTreeMap::new());
        let forming = FORMING.min(lobby.config.bounded_timeout() / 4);
        let last_call = deadline.checked_sub(forming).unwrap_or(deadline);
        Self { lobby, deadline, last_call, blamed, gone, silent, looks, strange }
    }

    /// Returns how long to wait for the answer of a leader.
    pub(super) fn patience(&self) -> Instant {
        self.deadline.min(Instant::now() + self.lobby.silence())
    }

    /// Returns how long to wait for the answer of a rank that is missing: the last call is not delayed by it.
    fn patience_for_missing(&self) -> Instant {
        let until = self.patience();
        if Instant::now() < self.last_call { until.min(self.last_call) } else { until }
    }

    /// Returns the lowest rank that is there, with its door; `None` where that is this one.
    pub(super) fn find_leader(&mut self) -> Attempt<Option<(usize, SocketAddr)>> {
        let lower = {
            let state = self.lobby.state();
            let members = state.newest().members();
            let door = |number: &usize| Some((*number, *state.doors.get(number)?));
            members.range(..self.lobby.own).filter_map(door).collect::<Vec<_>>()
        };
        let mut pause = PAUSES[0];
        loop {
            self.ask_the_launcher();
            let perhaps: Vec<_> =
                lower.iter().copied().filter(|(number, _)| !self.is_given_up(*number)).collect();
            let Some((first, door)) = perhaps.first().copied() else { break };
            // A rank that is there answers at once, and no other one need be asked. Where one was unresponsive, more may
            // be.
            let some = if self.silent.is_empty() { 1 } else { AT_ONCE.min(perhaps.len()) };
            let here = self.look_at(&perhaps[..some], self.patience())?;
            let lowest = perhaps.iter().find(|(number, _)| !self.is_given_up(*number));
            if let Some(leader) = lowest.filter(|(number, _)| here.contains(number)) {
                return Ok(Some(*leader));
            }
            if Instant::now() >= self.deadline {
                return Err(Miss::Again(format!("rank {first} cannot be reached at {door}")));
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
    pub(super) fn look(&mut self, number: usize, door: SocketAddr, until: Instant) -> Attempt<bool> {
        Ok(!self.look_at(&[(number, door)], until)?.is_empty())
    }

    /// Probes several ranks; returns those that are there.
    fn look_at(&mut self, ranks: &[(usize, SocketAddr)], until: Instant) -> Attempt<BTreeSet<usize>> {
        let sights = self.lobby.look_at_once(ranks, until);
        let mut here = BTreeSet::new();
        for (&(number, _), sight) in ranks.iter().zip(sights) {
            let tries = self.strange.remove(&number).unwrap_or_default() + 1;
            match sight {
                Sight::Here => {
                    self.silent.remove(&number);
                    here.insert(number);
                }
                Sight::Excluded => return Err(Miss::Final(excluded(self.lobby.own))),
                Sight::Silent => drop(self.silent.insert(number)),
                Sight::Strange { .. } if tries < SETTLED => drop(self.strange.insert(number, tries)),
                Sight::Strange { on_this_host: true } | Sight::Gone => self.has_ended(number),
                Sight::Strange { on_this_host: false } => drop(self.silent.insert(number)),
                Sight::Unsure => {}
            }
        }
        Ok(here)
    }

    fn has_ended(&mut self, number: usize) {
        self.gone.insert(number);
        self.lobby.state().history.have_ended([number]);
    }

    /// Reads the launchers' reports of processes that have ended.
    pub(super) fn ask_the_launcher(&mut self) {
        let Some(file) = &self.lobby.ended else { return };
        let ended = read_ended(file);
        if ended.is_empty() {
            return;
        }
        let known = self.lobby.state().newest().all();
        ended.intersection(&known).for_each(|number| self.has_ended(*number));
    }

    /// Probes the missing ranks again, at growing intervals. This rank does not lead where a lower one of the `members`
    /// is there after all.
    pub(super) fn look_for(
        &mut self,
        missing: &[(usize, SocketAddr)],
        members: &BTreeSet<usize>,
    ) -> Attempt<()> {
        let now = Instant::now();
        let is_due = |number: &usize| self.looks.get(number).is_none_or(|(due, _)| now >= *due);
        let due: Vec<_> = missing.iter().copied().filter(|(number, _)| is_due(number)).collect();
        for some in due.chunks(AT_ONCE) {
            if Instant::now() >= self.last_call {
                break;
            }
            let here = self.look_at(some, self.patience_for_missing())?;
            for (number, _) in some {
                let pause = self.looks.get(number).map_or(PAUSES[0], |(_, pause)| *pause);
                self.looks.insert(*number, (Instant::now() + pause, (pause * 2).min(PAUSES[1])));
            }
            let leads = |number: &&usize| {
                **number < self.lobby.own && members.contains(number) && !self.blamed.contains(number)
            };
            if let Some(number) = here.iter().find(leads) {
                return Err(Miss::Again(format!("rank {number} leads")));
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
    pub(super) fn has_looked(&self, missing: &[(usize, SocketAddr)]) -> bool {
        missing.iter().all(|(number, _)| self.looks.contains_key(number))
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
        let refused = || Fault::Io(ErrorKind::ConnectionRefused.into());
        for (fault, here, elsewhere) in [
            (refused(), Sight::Gone, Sight::Silent),
            (Fault::OtherRank(1), Sight::Gone, Sight::Silent),
            (Fault::Io(ErrorKind::HostUnreachable.into()), Sight::Silent, Sight::Silent),
            (Fault::Io(ErrorKind::PermissionDenied.into()), Sight::Silent, Sight::Silent),
            (Fault::TimedOut, Sight::Silent, Sight::Silent),
            (Fault::NotOurs, Sight::Strange { on_this_host: true }, Sight::Strange { on_this_host: false }),
            (
                Fault::ProofRefused,
                Sight::Strange { on_this_host: false },
                Sight::Strange { on_this_host: false },
            ),
        ] {
            assert_eq!([Sight::of(&fault, true), Sight::of(&fault, false)], [here, elsewhere], "{fault}");
            assert_eq!(is_lost(&fault), elsewhere == Sight::Silent);
        }
    }
}
