//! Who is left, and who leads.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::message::{Knock, LIMIT, Reply};
use super::{Attempt, FORMING, Hall, Miss};
use crate::Error;
use crate::tcp::fault::{Fault, Try};
use crate::tcp::handshake::{Caller, Credentials, Purpose, Status};
use crate::tcp::wire::Wire;

/// How long a rank may say nothing at all before the others look for another leader. It is less where the time-out is short.
const SILENCE: Duration = Duration::from_secs(5);
/// Between two looks at a rank that is about to be gone, or to come; each time twice as long.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(250)];

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
    /// Nobody listens at their doors any more.
    pub(super) gone: BTreeSet<usize>,
    /// They do not answer.
    pub(super) silent: BTreeSet<usize>,
    looks: BTreeMap<usize, (Instant, Duration)>,
    /// Tries in a row at which somebody else was at a door.
    strange: BTreeMap<usize, u32>,
}

/// Why nobody is found at a door.
enum Absence {
    /// Nobody is there, and nobody ever will be.
    Gone,
    /// No answer.
    Silent,
    /// Somebody who does not know this job, or has turned this rank away.
    Strange,
    /// Something came in between.
    Unsure,
}

impl Absence {
    fn of(fault: &Fault) -> Self {
        match fault {
            Fault::Io(error) if error.kind() == ErrorKind::ConnectionRefused => Absence::Gone,
            // It proved to be of this job: the one before it is gone, and its port was given to another.
            Fault::OtherRank(_) => Absence::Gone,
            Fault::ProofRefused | Fault::BadProof | Fault::NotOurs | Fault::Version(_) => Absence::Strange,
            Fault::TimedOut | Fault::Io(_) => Absence::Silent,
            _ => Absence::Unsure,
        }
    }
}

/// Whether whoever was at a door is not there any more, or stands still.
pub(super) fn is_lost(fault: &Fault) -> bool {
    matches!(Absence::of(fault), Absence::Gone | Absence::Silent)
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
        let (_, people) = self.lobby.state().newest();
        for (number, door) in people.range(..self.lobby.own) {
            let mut pause = PAUSES[0];
            while !self.gone.contains(number)
                && !self.blamed.contains(number)
                && !self.silent.contains(number)
            {
                if self.look(*number, *door, self.patience())? {
                    return Ok(Some((*number, *door)));
                }
                if Instant::now() >= self.deadline {
                    return Err(Miss::Again(format!("rank {number} cannot be reached at {door}")));
                }
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
        let lobby = self.lobby;
        let probe = Knock::Probe { number: lobby.own, generation: lobby.state().generation };
        let found = knock(door, Some(number), (&lobby.credentials, lobby.own as u32), &probe, until);
        let mut wire = match found.map_err(|fault| Absence::of(&fault)) {
            Ok(wire) => wire,
            Err(Absence::Gone) => {
                self.gone.insert(number);
                return Ok(false);
            }
            Err(Absence::Silent) => {
                self.silent.insert(number);
                return Ok(false);
            }
            Err(Absence::Strange) => {
                let times = self.strange.entry(number).or_default();
                *times += 1;
                if *times >= SETTLED {
                    self.gone.insert(number);
                }
                return Ok(false);
            }
            Err(Absence::Unsure) => return Ok(false),
        };
        self.strange.remove(&number);
        match wire.receive(LIMIT, until) {
            Ok(Reply::Here) => {
                self.silent.remove(&number);
                Ok(true)
            }
            Ok(Reply::Excluded) => Err(Miss::Final(excluded(lobby.own))),
            Err(Fault::TimedOut) => {
                self.silent.insert(number);
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    /// Looks again at those who are missing, now and then. This rank does not lead where a lower one is there after all.
    pub(super) fn look_for(&mut self, missing: &[(usize, SocketAddr)]) -> Attempt<()> {
        for (number, door) in missing {
            let now = Instant::now();
            let (due, pause) = self.looks.get(number).copied().unwrap_or((now, PAUSES[0]));
            if now >= due {
                let is_here = self.look(*number, *door, self.patience_for_missing())?;
                self.looks.insert(*number, (Instant::now() + pause, (pause * 2).min(PAUSES[1])));
                if is_here && *number < self.lobby.own && !self.blamed.contains(number) {
                    return Err(Miss::Again(format!("rank {number} leads")));
                }
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
