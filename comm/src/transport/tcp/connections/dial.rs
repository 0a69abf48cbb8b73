//! Data connections, the side that dials: a thread that runs as long as there are connections to make.

use std::io::ErrorKind;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{ConnectionState, ConnectionTable, DataConnections, Side};
use crate::base::last_message::LastMessage;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{HandshakeStatus, Verdict};
use crate::connection::wire::HandshakeStream;
use crate::transport::links::OpenError;

/// Sent by the rank that dials to the one that was dialed, once it has read the answer.
pub(super) const ANSWER_RECEIVED: [u8; 1] = [1];
/// Tries in a row that were answered by something other than the peer, after which the peer counts as unreachable.
const MAX_WRONG_ANSWERS: u32 = 5;
const STACK: usize = 256 * 1024;
/// First and longest pause between two tries; it doubles with each.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// A connection that this rank needs and does not have.
pub(super) struct ConnectionRequest {
    /// When to try next.
    due: Instant,
    pause: Duration,
    /// Tries in a row that were answered by something other than the peer.
    strange: u32,
    /// The error of the last try.
    trouble: Option<String>,
    /// Why there will be no further try; None while there will.
    pub(super) failure: Option<OpenError>,
}

impl DataConnections {
    /// Requests a connection to a peer; an error if it is already known that none can be made.
    pub(super) fn request(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, ConnectionTable>,
        peer: usize,
    ) -> Result<(), OpenError> {
        if let Some(wish) = state.wishes.get(&peer) {
            return wish.failure.clone().map_or(Ok(()), Err);
        }
        let (due, pause) = (Instant::now(), PAUSES[0]);
        state.wishes.insert(peer, ConnectionRequest { due, pause, strange: 0, trouble: None, failure: None });
        if state.dialing {
            drop(state);
            self.changed.notify_all();
            return Ok(());
        }
        let data_connections = self.clone();
        let thread = std::thread::Builder::new().name("comm-dial".into()).stack_size(STACK);
        let thread = thread.spawn(move || data_connections.make_connections());
        let failed = |reason| OpenError::Here(format!("starting a thread: {reason}"));
        state.dialer = Some(thread.map_err(failed)?);
        state.dialing = true;
        Ok(())
    }

    /// Returns why the connection to a peer is not there yet: the error of the last try.
    pub(crate) fn last_error(&self, peer: usize) -> String {
        let state = self.state();
        let wish = state.wishes.get(&peer);
        let trouble = wish.and_then(|wish| wish.trouble.clone());
        trouble.unwrap_or_else(|| self.reason(peer, &ConnectError::TimedOut))
    }

    fn reason(&self, peer: usize, fault: &ConnectError) -> String {
        format!("{fault} ({})", self.setup.peers[peer].address)
    }

    /// Body of the dialing thread.
    fn make_connections(&self) {
        while let Some(peer) = self.next_wish() {
            if let Err(fault) = self.dial(peer, Instant::now() + self.setup.timeout) {
                self.record_failure(peer, &fault);
            }
        }
    }

    /// Waits until there is a peer to dial and returns it; None when there is nothing more to do.
    fn next_wish(&self) -> Option<usize> {
        let mut state = self.state();
        loop {
            let ConnectionTable { wishes, lines, closed, .. } = &mut *state;
            wishes.retain(|peer, _| !matches!(lines[*peer], ConnectionState::Open { .. }));
            let mut open = wishes.iter().filter(|(_, wish)| wish.failure.is_none()).peekable();
            if *closed || open.peek().is_none() {
                state.dialing = false;
                return None;
            }
            // Where an attempt is already under way, its outcome must be awaited.
            let next = open
                .filter(|(peer, _)| matches!(lines[**peer], ConnectionState::Idle))
                .min_by_key(|(_, wish)| wish.due);
            let now = Instant::now();
            let wait = match next {
                Some((peer, wish)) if wish.due <= now => return Some(*peer),
                Some((_, wish)) => wish.due - now,
                None => self.setup.timeout,
            };
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that a try has failed, and whether there will be another.
    pub(super) fn record_failure(&self, peer: usize, fault: &ConnectError) {
        let reason = self.reason(peer, fault);
        let mut state = self.state();
        let ConnectionTable { wishes, lines, .. } = &mut *state;
        let Some(wish) = wishes.get_mut(&peer) else { return };
        let is_strange = matches!(
            fault,
            ConnectError::NotOurs
                | ConnectError::OtherRank(_)
                | ConnectError::BadProof
                | ConnectError::Version(_)
        );
        wish.strange = if is_strange { wish.strange + 1 } else { 0 };
        wish.failure = match fault {
            // The peer is making the connection itself. It may regard it as established before this rank does, send all its
            // data and leave.
            ConnectError::Crossed => None,
            _ if matches!(lines[peer], ConnectionState::Answering(_)) => None,
            ConnectError::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
                Some(OpenError::Unreachable(reason.clone()))
            }
            fault if fault.is_out_of_files() => Some(OpenError::Here(fault.to_string())),
            ConnectError::Gone(words) => Some(OpenError::Left(words.clone())),
            ConnectError::NoMemory(obstacle) => Some(OpenError::Here(format!(
                "they cannot share memory, because {obstacle}; choose auto or tcp"
            ))),
            _ if wish.strange >= MAX_WRONG_ANSWERS => Some(OpenError::Unreachable(reason.clone())),
            _ => None,
        };
        wish.trouble = Some(reason);
        wish.due = Instant::now() + wish.pause;
        wish.pause = (wish.pause * 2).min(PAUSES[1]);
        drop(state);
        self.changed.notify_all();
    }

    /// Dials a peer once. Succeeds where this try made a connection, or where there was one already.
    pub(crate) fn dial(&self, peer: usize, deadline: Instant) -> ConnectResult<()> {
        let mut state = self.state();
        if state.closed {
            return Err(ConnectError::Stopped);
        }
        match &mut state.lines[peer] {
            ConnectionState::Open { .. } => return Ok(()),
            ConnectionState::Dialing | ConnectionState::Answering(_) => return Err(ConnectError::Crossed),
            line @ ConnectionState::Idle => *line = ConnectionState::Dialing,
        }
        drop(state);
        self.finish_attempt(peer, Side::Dialed, self.connect(peer, deadline))
    }

    fn connect(
        &self,
        peer: usize,
        deadline: Instant,
    ) -> ConnectResult<(HandshakeStream, Option<crate::transport::shm::RingPair>)> {
        let until = deadline.min(Instant::now() + self.setup.handshake);
        let mut wire =
            HandshakeStream::dial(self.setup.peers[peer].address, Some(self.stopped.clone()), until)?;
        let Verdict { status, rank, .. } =
            wire.authenticate(&self.setup.credentials, self.setup.own, until)?;
        match status {
            _ if rank as usize != peer => return Err(ConnectError::OtherRank(rank)),
            HandshakeStatus::Admitted => {}
            HandshakeStatus::Crossed => return Err(ConnectError::Crossed),
            HandshakeStatus::Gone => {
                return Err(ConnectError::Gone(
                    wire.read_last_words(None, until).unwrap_or(LastMessage::Farewell),
                ));
            }
            HandshakeStatus::OtherWorldSize | HandshakeStatus::NotAwaited => {
                return Err(ConnectError::NotAwaited);
            }
        }
        let deadline = Instant::now() + self.setup.timeout;
        wire.write(&ANSWER_RECEIVED, deadline)?;
        let pair = self.share(peer, &mut wire, deadline)?;
        Ok((wire, pair))
    }
}
