//! The side that dials: a thread that lives as long as there are connections to make.

use std::io::ErrorKind;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Line, State, Switchboard};
use crate::base::last_words::LastWords;
use crate::rendezvous::connection::fault::{Fault, Try};
use crate::rendezvous::connection::handshake::{Status, Verdict};
use crate::rendezvous::connection::wire::Wire;
use crate::transport::links::Unopened;

/// What goes from who dials to who was dialed, when the one has seen the other's answer.
pub(super) const SEEN: [u8; 1] = [1];
/// After so many tries in a row it is believed that somebody else is at a peer's address.
const SETTLED: u32 = 5;
const STACK: usize = 256 * 1024;
/// Between two tries; each time twice as long.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// A connection that this rank needs and does not have.
pub(super) struct Wish {
    pub(super) peer: usize,
    /// When to try.
    due: Instant,
    pause: Duration,
    /// Tries in a row that met somebody else.
    strange: u32,
    /// What came of the last try.
    trouble: Option<String>,
    /// Why there will be no further one.
    pub(super) failure: Option<Unopened>,
}

impl Switchboard {
    /// Notes that a connection is needed; tells if it cannot be made.
    pub(super) fn wish(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        peer: usize,
    ) -> Result<(), Unopened> {
        if let Some(wish) = state.wishes.iter().find(|wish| wish.peer == peer) {
            return wish.failure.clone().map_or(Ok(()), Err);
        }
        let (due, pause) = (Instant::now(), PAUSES[0]);
        state.wishes.push(Wish { peer, due, pause, strange: 0, trouble: None, failure: None });
        if state.dialing {
            drop(state);
            self.changed.notify_all();
            return Ok(());
        }
        let switchboard = self.clone();
        let thread = std::thread::Builder::new().name("comm-dial".into()).stack_size(STACK);
        let thread = thread.spawn(move || switchboard.make_connections());
        let failed = |reason| Unopened::Here(format!("starting a thread: {reason}"));
        state.dialer = Some(thread.map_err(failed)?);
        state.dialing = true;
        Ok(())
    }

    /// What is in the way of a connection that is not there yet.
    pub(crate) fn trouble(&self, peer: usize) -> String {
        let state = self.state();
        let wish = state.wishes.iter().find(|wish| wish.peer == peer);
        let trouble = wish.and_then(|wish| wish.trouble.clone());
        trouble.unwrap_or_else(|| self.reason(peer, &Fault::TimedOut))
    }

    fn reason(&self, peer: usize, fault: &Fault) -> String {
        format!("{fault} ({})", self.setup.peers[peer].address)
    }

    /// The life of the thread.
    fn make_connections(&self) {
        while let Some(peer) = self.next_wish() {
            if let Err(fault) = self.dial(peer, Instant::now() + self.setup.timeout) {
                self.note(peer, &fault);
            }
        }
    }

    /// The peer to dial next, when it is time; None when there is nothing more to do.
    fn next_wish(&self) -> Option<usize> {
        let mut state = self.state();
        loop {
            let State { wishes, lines, closed, .. } = &mut *state;
            wishes.retain(|wish| !matches!(lines[wish.peer], Line::Open { .. }));
            let mut open = wishes.iter().filter(|wish| wish.failure.is_none()).peekable();
            if *closed || open.peek().is_none() {
                state.dialing = false;
                return None;
            }
            // Where the peer is at it, there is nothing to do but to see what comes of it.
            let next = open.filter(|wish| matches!(lines[wish.peer], Line::Idle)).min_by_key(|wish| wish.due);
            let now = Instant::now();
            let wait = match next {
                Some(wish) if wish.due <= now => return Some(wish.peer),
                Some(wish) => wish.due - now,
                None => self.setup.timeout,
            };
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A try has come to nothing: there will be another one, or none.
    fn note(&self, peer: usize, fault: &Fault) {
        let reason = self.reason(peer, fault);
        let mut state = self.state();
        let Some(wish) = state.wishes.iter_mut().find(|wish| wish.peer == peer) else { return };
        let is_strange =
            matches!(fault, Fault::NotOurs | Fault::OtherRank(_) | Fault::BadProof | Fault::Version(_));
        wish.strange = if is_strange { wish.strange + 1 } else { 0 };
        wish.failure = match fault {
            // The two have met half-way.
            Fault::Crossed => None,
            Fault::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
                Some(Unopened::Unreachable(reason.clone()))
            }
            fault if fault.is_exhausted() => Some(Unopened::Here(fault.to_string())),
            Fault::Gone(words) => Some(Unopened::Left(words.clone())),
            Fault::NoMemory(obstacle) => Some(Unopened::Here(format!(
                "they cannot share memory, because {obstacle}; choose auto or tcp"
            ))),
            _ if wish.strange >= SETTLED => Some(Unopened::Unreachable(reason.clone())),
            _ => None,
        };
        wish.trouble = Some(reason);
        wish.due = Instant::now() + wish.pause;
        wish.pause = (wish.pause * 2).min(PAUSES[1]);
        drop(state);
        self.changed.notify_all();
    }

    /// Dials once. Fine where there is a connection in the end, whichever side has made it.
    pub(crate) fn dial(&self, peer: usize, deadline: Instant) -> Try<()> {
        let mut state = self.state();
        if state.closed {
            return Err(Fault::Stopped);
        }
        match &mut state.lines[peer] {
            Line::Open { .. } => return Ok(()),
            Line::Dialing | Line::Answering(_) => return Err(Fault::Crossed),
            line @ Line::Idle => *line = Line::Dialing,
        }
        drop(state);
        // That this rank's connection was admitted means that the peer has given up its own.
        let is_mine = |line: &Line| !matches!(line, Line::Open { .. });
        match self.connect(peer, deadline) {
            Ok(connection) => self.conclude(peer, is_mine, Ok(connection)),
            Err(fault) => self.conclude(peer, |line| matches!(line, Line::Dialing), Err(fault)),
        }
    }

    fn connect(&self, peer: usize, deadline: Instant) -> Try<(Wire, Option<crate::transport::shm::Pair>)> {
        let until = deadline.min(Instant::now() + self.setup.handshake);
        let mut wire = Wire::dial(self.setup.peers[peer].address, Some(self.stopped.clone()), until)?;
        let Verdict { status, rank, .. } = wire.introduce(&self.setup.credentials, self.setup.own, until)?;
        match status {
            _ if rank as usize != peer => return Err(Fault::OtherRank(rank)),
            Status::Admitted => {}
            Status::Crossed => return Err(Fault::Crossed),
            Status::Gone => {
                return Err(Fault::Gone(wire.last_words(None, until).unwrap_or(LastWords::Farewell)));
            }
            Status::OtherWorldSize | Status::NotAwaited => return Err(Fault::NotAwaited),
        }
        let deadline = Instant::now() + self.setup.timeout;
        wire.write(&SEEN, deadline)?;
        let pair = self.share(peer, &mut wire, deadline)?;
        Ok((wire, pair))
    }
}
