//! Acceptor of connections, during rendezvous and later for data, which limits what unauthenticated peers can use. A
//! connection that has not proved that it belongs to the job costs a file descriptor and what has arrived of its proof:
//! the rank's [`PollThread`] advances all of them without waiting for any. Their number is limited, separately for those that have sent
//! nothing and those in the handshake; none outlives the meeting or the group; and where there are too many, those of one
//! address are closed in favour of those of another. A connection that has proved it no longer counts. It gets a thread of
//! its own, or, where its handler waits for one message, is read by the same thread as the others.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::connect_error::{ConnectError, ConnectResult};
use super::handshake::{Admission, Credentials};
use super::poll_thread::{PollThread, Polled, Served};
use super::stop::{StopOnDrop, Stopped};
use super::wire::{HandshakeStep, HandshakeStream};
use crate::base::lock;
use crate::{Error, Result};

const STACK: usize = 256 * 1024;
/// How long to leave a listener alone that cannot accept, for example because there are too many open files.
const PAUSE: Duration = Duration::from_millis(50);
/// How often that is logged.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// Limits on connections that have not proved that they belong to the job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How long the proof may take.
    pub(crate) handshake: Duration,
    /// How many connections may be idle at once, and how many may be in the handshake. One more is closed; a rank
    /// connects again.
    pub(crate) at_once: usize,
    /// Age from which an idle connection is closed in favour of a new one: a rank sends as soon as it is connected.
    pub(crate) idle_grace: Duration,
    /// Time in the handshake from which a connection is closed in favour of a new one. A rank needs two or three round
    /// trips.
    pub(crate) handshake_grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            at_once: 64,
            idle_grace: Duration::from_millis(250),
            handshake_grace: Duration::from_secs(1),
        }
    }
}

/// Backlog of connections that wait to be accepted; the system has a limit of its own.
pub(crate) const BACKLOG: i32 = 4096;

/// Handler of an acceptor's connections.
pub(crate) trait ConnectionHandler: Send + Sync {
    /// Credentials that connections must prove.
    fn credentials(&self) -> &Credentials;

    /// Answers a connection that has proved them, without waiting, where the handler waits for one message: returns the limit of that
    /// message's length. It is passed to [`Self::receive`].
    fn admit(&self, _wire: &mut HandshakeStream, _admission: &Admission) -> ConnectResult<Option<usize>> {
        Ok(None)
    }

    /// Takes the message, as it was sent, without waiting.
    fn receive(&self, _wire: HandshakeStream, _admission: &Admission, _message: &[u8]) -> ConnectResult<()> {
        Err(ConnectError::NotAwaited)
    }

    /// Serves a connection that has proved them, in its own thread; `until` is when the time for its handshake is over. One that was
    /// admitted, where the acceptor stops before its message has come.
    fn serve(&self, wire: HandshakeStream, admission: Admission, until: Instant) -> ConnectResult<()>;

    /// Called for a connection that has sent something, and has not proved that it belongs to the job.
    fn rejected(&self) {}
}

/// Listeners that a [`PollThread`] serves. Dropping it closes the listeners and ends all connections in progress.
#[derive(Debug)]
pub(crate) struct Acceptor {
    stop: Option<StopOnDrop>,
    served: Option<Served>,
    /// The threads of connections that have proved that they belong to the job.
    greeting: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl Acceptor {
    pub(crate) fn start(
        listeners: Vec<TcpListener>,
        limits: Limits,
        greet: Arc<dyn ConnectionHandler>,
        thread: &PollThread,
    ) -> Result<Self> {
        let failed = |reason| Error::system("accepting connections", ConnectError::from(reason));
        for listener in &listeners {
            listener.set_nonblocking(true).map_err(failed)?;
            enlarge_backlog(listener);
        }
        let (stop, stopped) = StopOnDrop::new()?;
        let greeting = Arc::default();
        let serve = Serve {
            listeners,
            limits,
            greet,
            stopped,
            greeting: Arc::clone(&greeting),
            strangers: Unauthenticated::default(),
            admitted: Vec::new(),
            paused_until: None,
            complained: None,
        };
        let served = Some(thread.serve(Box::new(serve))?);
        Ok(Self { stop: Some(stop), served, greeting })
    }
}

/// Enlarges the listener's backlog: ranks may connect all at once, and strangers before them. If that fails, ranks
/// connect again.
fn enlarge_backlog(listener: &TcpListener) {
    let _ = rustix::net::listen(listener, BACKLOG);
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.served.take().into_iter().for_each(Served::wait);
        for thread in std::mem::take(&mut *lock(&self.greeting)) {
            let _ = thread.join();
        }
    }
}

struct Serve {
    listeners: Vec<TcpListener>,
    limits: Limits,
    greet: Arc<dyn ConnectionHandler>,
    stopped: Arc<Stopped>,
    greeting: Arc<Mutex<Vec<JoinHandle<()>>>>,
    strangers: Unauthenticated,
    admitted: Vec<AdmittedConnection>,
    /// Until when the listeners are left alone.
    paused_until: Option<Instant>,
    complained: Option<Instant>,
}

/// A connection without proof, its address, and when it was accepted.
struct PendingConnection {
    wire: HandshakeStream,
    from: SocketAddr,
    since: Instant,
}

/// A connection in the handshake, since when, and the poll events that it waits for.
struct HandshakingConnection {
    pending: PendingConnection,
    spoke: Instant,
    waits: PollFlags,
}

/// A connection that has proved that it belongs to the job, and whose message, of at most `limit` bytes, is to come.
struct AdmittedConnection {
    pending: PendingConnection,
    admission: Admission,
    limit: usize,
}

/// Connections that have not proved yet that they belong to the job, the oldest first.
#[derive(Default)]
struct Unauthenticated {
    /// They have sent nothing, or not yet their whole first message, which shows whether they hold the job's secret.
    idle: VecDeque<PendingConnection>,
    handshaking: VecDeque<HandshakingConnection>,
}

/// Returns the index of the oldest connection of the address that has most of them, if these are more than the address of the
/// pending connection has with it.
fn eviction_candidate<'a>(
    all: impl Iterator<Item = &'a PendingConnection>,
    pending: &PendingConnection,
) -> Option<usize> {
    let mut by_address: BTreeMap<IpAddr, (usize, usize)> = BTreeMap::new();
    for (at, stranger) in all.enumerate() {
        by_address.entry(stranger.from.ip()).or_insert((0, at)).0 += 1;
    }
    let own = by_address.get(&pending.from.ip()).map_or(0, |&(count, _)| count);
    let (most, oldest) = by_address.into_values().max_by_key(|&(count, _)| count)?;
    (most > own + 1).then_some(oldest)
}

impl Unauthenticated {
    fn all(&self) -> impl Iterator<Item = &PendingConnection> {
        self.idle.iter().chain(self.handshaking.iter().map(|connection| &connection.pending))
    }
}

impl Polled for Serve {
    /// The end, and the listeners and all connections, unless they are left alone.
    fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        fds.push(PollFd::new(&self.stopped, PollFlags::IN));
        if self.paused_until.is_some() {
            return;
        }
        let of = PollFd::from_borrowed_fd;
        let Unauthenticated { idle, handshaking } = &self.strangers;
        fds.extend(self.listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(idle.iter().map(|pending| of(pending.wire.fd(), PollFlags::IN)));
        fds.extend(handshaking.iter().map(|connection| of(connection.pending.wire.fd(), connection.waits)));
        fds.extend(self.admitted.iter().map(|connection| of(connection.pending.wire.fd(), PollFlags::IN)));
    }

    fn due(&self) -> Option<Instant> {
        let ends = self.strangers.all().map(|pending| pending.since + self.limits.handshake).min();
        self.paused_until.or(ends)
    }

    /// Advances the connections that are ready, and accepts new ones.
    fn act(&mut self, ready: &[bool]) -> bool {
        let [_, ready @ ..] = ready else { return true };
        if self.stopped.is_over() {
            for AdmittedConnection { pending, admission, .. } in std::mem::take(&mut self.admitted) {
                self.serve_in_thread(pending, admission);
            }
            return false;
        }
        match self.paused_until {
            Some(until) if Instant::now() < until => return true,
            Some(_) => self.paused_until = None,
            None => self.serve_ready(ready),
        }
        true
    }

    fn save_resources(&mut self) {
        self.pause();
    }
}

impl Serve {
    fn serve_ready(&mut self, ready: &[bool]) {
        let (comes, ready) = ready.split_at(self.listeners.len());
        let admitted = std::mem::take(&mut self.admitted);
        let (strangers, messages) = ready.split_at(ready.len() - admitted.len());
        self.advance_ready(strangers);
        for (connection, is_ready) in admitted.into_iter().zip(messages) {
            match is_ready {
                true => self.receive(connection),
                false => self.admitted.push(connection),
            }
        }
        for at in (0..comes.len()).filter(|at| comes[*at]) {
            match self.listeners[at].accept() {
                Ok((stream, from)) => self.admit(stream, from),
                Err(error) if is_momentary(&error) => {}
                Err(error) => {
                    if self.complained.is_none_or(|at| at.elapsed() >= COMPLAIN_EVERY) {
                        tracing::warn!("cannot accept connections for the moment: {error}");
                        self.complained = Some(Instant::now());
                    }
                    self.pause();
                }
            }
        }
    }

    /// Takes a new connection.
    fn admit(&mut self, stream: TcpStream, from: SocketAddr) {
        let Ok(wire) = HandshakeStream::new(stream, Some(self.stopped.clone())) else { return };
        let pending = PendingConnection { wire, from, since: Instant::now() };
        match pending.wire.has_arrived() {
            Some(true) => self.begin(pending),
            Some(false) => self.add_idle(pending),
            None => {}
        }
    }

    /// Advances the connections without proof that are ready, and closes those whose time is over.
    fn advance_ready(&mut self, ready: &[bool]) {
        let mut ready = ready.iter().copied();
        let mut spoken = Vec::new();
        for pending in std::mem::take(&mut self.strangers.idle) {
            // Taken whatever becomes of this one, so that those after it get their own.
            let is_ready = ready.next().unwrap_or(false);
            if pending.since.elapsed() >= self.limits.handshake {
                self.close(&pending);
            } else if is_ready {
                spoken.push(pending);
            } else {
                self.strangers.idle.push_back(pending);
            }
        }
        for connection in std::mem::take(&mut self.strangers.handshaking) {
            if ready.next().unwrap_or(false) {
                let waiting = self.advance(connection);
                self.strangers.handshaking.extend(waiting);
            } else if connection.pending.since.elapsed() < self.limits.handshake {
                self.strangers.handshaking.push_back(connection);
            } else {
                self.close(&connection.pending);
            }
        }
        spoken.into_iter().for_each(|pending| self.on_first_data(pending));
    }

    /// Leaves the listeners alone for a while, where the system lacks the resources for another connection.
    fn pause(&mut self) {
        // The idle connections may hold what is missing.
        self.strangers.idle.clear();
        self.paused_until = Some(Instant::now() + PAUSE);
    }

    /// Adds a connection to the idle ones, whose first message is not complete.
    fn add_idle(&mut self, pending: PendingConnection) {
        let idle = &mut self.strangers.idle;
        if idle.len() >= self.limits.at_once {
            let may_go = |oldest: &PendingConnection| oldest.since.elapsed() >= self.limits.idle_grace;
            let place = eviction_candidate(idle.iter(), &pending);
            let place = place.or_else(|| idle.front().is_some_and(may_go).then_some(0));
            match place.and_then(|at| idle.remove(at)) {
                Some(other) => self.close(&other),
                None => return self.drop_excess(&pending),
            }
        }
        let idle = &mut self.strangers.idle;
        let at = idle.partition_point(|other| other.since <= pending.since);
        idle.insert(at, pending);
    }

    /// Handles the first bytes of a connection, or more of its first message.
    fn on_first_data(&mut self, pending: PendingConnection) {
        if pending.wire.is_open() {
            self.begin(pending);
        }
    }

    /// Begins the handshake of a connection, or goes on with its first message.
    fn begin(&mut self, pending: PendingConnection) {
        let connection = HandshakingConnection { pending, spoke: Instant::now(), waits: PollFlags::IN };
        match self.advance(connection) {
            None => {}
            Some(connection) if connection.pending.wire.has_opening() => self.add_handshaking(connection),
            Some(connection) => self.add_idle(connection.pending),
        }
    }

    /// Adds a connection to those in the handshake, once its first message is complete. The same message as that of
    /// another connection is a replay, and is refused.
    fn add_handshaking(&mut self, connection: HandshakingConnection) {
        let handshaking = &mut self.strangers.handshaking;
        let opening = connection.pending.wire.client_opening();
        if opening.is_some() && handshaking.iter().any(|other| other.pending.wire.client_opening() == opening)
        {
            return self.reject(connection.pending.from, &ConnectError::BadProof);
        }
        if handshaking.len() >= self.limits.at_once {
            let may_go =
                |oldest: &HandshakingConnection| oldest.spoke.elapsed() >= self.limits.handshake_grace;
            let place = eviction_candidate(
                handshaking.iter().map(|connection| &connection.pending),
                &connection.pending,
            );
            let place = place.or_else(|| handshaking.front().is_some_and(may_go).then_some(0));
            match place.and_then(|at| handshaking.remove(at)) {
                Some(other) => self.close(&other.pending),
                None => return self.drop_excess(&connection.pending),
            }
        }
        self.strangers.handshaking.push_back(connection);
    }

    /// Drops a connection that exceeds the limit.
    fn drop_excess(&self, pending: &PendingConnection) {
        tracing::debug!(from = %pending.from, "too many connections at once: one was closed");
    }

    /// Drops a connection whose time is over; one that has sent something counts as turned away.
    fn close(&self, pending: &PendingConnection) {
        if pending.wire.has_received() {
            self.reject(pending.from, &ConnectError::TimedOut);
        }
    }

    /// Advances the handshake of a connection; returns `None` when it has succeeded or failed.
    fn advance(&mut self, mut connection: HandshakingConnection) -> Option<HandshakingConnection> {
        let from = connection.pending.from;
        match connection.pending.wire.step(self.greet.credentials()) {
            Ok(HandshakeStep::Waits(flags)) => {
                return Some(HandshakingConnection { waits: flags, ..connection });
            }
            Ok(HandshakeStep::Proved(admission)) => self.serve_authenticated(connection.pending, *admission),
            Err(fault) => self.reject(from, &fault),
        }
        None
    }

    fn reject(&self, from: SocketAddr, fault: &ConnectError) {
        turn_away(from, fault);
        self.greet.rejected();
    }

    /// Serves a connection that has proved that it belongs to the job.
    fn serve_authenticated(&mut self, mut pending: PendingConnection, admission: Admission) {
        match self.greet.admit(&mut pending.wire, &admission) {
            Ok(Some(limit)) => self.receive(AdmittedConnection { pending, admission, limit }),
            Ok(None) => self.serve_in_thread(pending, admission),
            Err(fault) => turn_away(pending.from, &fault),
        }
    }

    /// Receives what has arrived of a connection's message.
    fn receive(&mut self, mut connection: AdmittedConnection) {
        let from = connection.pending.from;
        let received = match connection.pending.wire.try_receive_frame(connection.limit) {
            Ok(None) => return self.admitted.push(connection),
            Ok(Some(message)) => self.greet.receive(connection.pending.wire, &connection.admission, &message),
            Err(fault) => Err(fault),
        };
        received.unwrap_or_else(|fault| turn_away(from, &fault));
    }

    /// Starts a thread for a connection that has proved that it belongs to the job.
    fn serve_in_thread(&self, pending: PendingConnection, admission: Admission) {
        let PendingConnection { wire, from, since } = pending;
        let (greet, until) = (self.greet.clone(), since + self.limits.handshake);
        let work = move || {
            if let Err(fault) = greet.serve(wire, admission, until) {
                turn_away(from, &fault);
            }
        };
        let builder = thread::Builder::new().name("girandole-greet".into()).stack_size(STACK);
        match builder.spawn(work) {
            Ok(thread) => {
                let mut greeting = lock(&self.greeting);
                greeting.retain(|thread| !thread.is_finished());
                greeting.push(thread);
            }
            Err(error) => tracing::debug!(%from, %error, "no thread for a connection: it was closed"),
        }
    }
}

fn turn_away(from: SocketAddr, fault: &ConnectError) {
    tracing::debug!(%from, reason = %fault, "a connection was turned away");
}

fn is_momentary(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
}

#[cfg(test)]
mod tests;
