//! Who is left, and who leads.

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

/// How long a rank may say nothing at all before the others look for another leader. It is less where the time-out is short.
const SILENCE: Duration = Duration::from_secs(5);
/// Between two looks at a rank that is about to be gone, or to come; each time twice as long.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(250)];

/// So many ranks are looked at at the same time, at most: each takes a thread and a socket.
const AT_ONCE: usize = 64;
/// After so many tries in a row it is believed that somebody else is at a door.
const SETTLED: u32 = 5;

/// What one rank finds out about the others while it looks for them.
pub(super) struct Search<'a> {
    pub(super) lobby: &'a Hall,
    pub(super) deadline: Instant,
    /// Who has not come by then is not waited for any longer: those who have still need the time to form a group.
    pub(super) last_call: Instant,
    /// They are not waited for.
    pub(super) blamed: BTreeSet<usize>,
    /// They are known to have ended.
    gone: BTreeSet<usize>,
    /// They do not answer.
    pub(super) silent: BTreeSet<usize>,
    looks: BTreeMap<usize, (Instant, Duration)>,
    /// Tries in a row at which somebody else was at a door.
    strange: BTreeMap<usize, u32>,
}

/// What a look at a rank's door shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    Here,
    /// Somebody who says that the group has gone on without this rank.
    Excluded,
    /// Nobody, and nobody ever will be.
    Gone,
    /// No answer, or none that proves anything.
    Silent,
    /// Another program, or one that has turned this rank away.
    Strange {
        on_this_host: bool,
    },
    /// Something came in between.
    Unsure,
}

impl Sight {
    /// What it means that a rank cannot be spoken to. Only on this host does it prove something that nobody listens at its
    /// door, or somebody else does: between hosts a firewall refuses, and answers, in the name of a rank that lives.
    fn of(fault: &Fault, on_this_host: bool) -> Self {
        match fault {
            Fault::Io(error) if on_this_host && error.kind() == ErrorKind::ConnectionRefused => Sight::Gone,
            // It proved to be of this job: the one before it is gone, and its port was given to another.
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

/// Whether whoever was at a door is not there any more, or stands still, or cannot be reached.
pub(super) fn is_lost(fault: &Fault) -> bool {
    Sight::of(fault, false) == Sight::Silent
}

/// Whose processes a launcher has seen end: a number on each line that is whole.
fn read_ended(file: &Path) -> BTreeSet<usize> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Knocks at a door.
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

    /// Whether this address is one of this host.
    fn is_on_this_host(&self, door: SocketAddr) -> bool {
        let ip = door.ip().to_canonical();
        ip.is_loopback() || ip == self.door.ip().to_canonical()
    }

    /// Looks whether a rank is there.
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

    /// The same of several at the same time: those who are silent take no longer than one of them.
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
                // There are no threads left, and there may be no time.
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

    /// How long to wait for a leader's word.
    pub(super) fn patience(&self) -> Instant {
        self.deadline.min(Instant::now() + self.lobby.silence())
    }

    /// How long to wait for the word of one who is missing: the last call does not wait for it.
    fn patience_for_missing(&self) -> Instant {
        let until = self.patience();
        if Instant::now() < self.last_call { until.min(self.last_call) } else { until }
    }

    /// The lowest rank that is there, where it is not this one.
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
            // One that is there answers at once, and no other one need be asked. Where one was silent, more may be.
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
        // Whoever did not answer may do so when all is tried again.
        self.silent.clear();
        Ok(None)
    }

    /// Looks whether a rank is there; what is known of it otherwise is noted.
    pub(super) fn look(&mut self, number: usize, door: SocketAddr, until: Instant) -> Attempt<bool> {
        Ok(!self.look_at(&[(number, door)], until)?.is_empty())
    }

    /// The same of several ranks: those that are there.
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

    /// Takes the word of the launchers that have seen processes end.
    pub(super) fn ask_the_launcher(&mut self) {
        let Some(file) = &self.lobby.ended else { return };
        let ended = read_ended(file);
        if ended.is_empty() {
            return;
        }
        let known = self.lobby.state().newest().all();
        ended.intersection(&known).for_each(|number| self.has_ended(*number));
    }

    /// Looks again at those who are missing, now and then. This rank does not lead where a lower one of the `members` is there
    /// after all.
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
    /// Whether this rank need not be waited for.
    pub(super) fn is_given_up(&self, number: usize) -> bool {
        self.blamed.contains(&number) || self.silent.contains(&number) || self.gone.contains(&number)
    }

    /// Whether each of them was looked for.
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
