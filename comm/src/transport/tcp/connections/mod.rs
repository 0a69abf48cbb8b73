//! Data connections of one rank, made when they are first needed and then kept. A rank holds one for each peer that its
//! operations use: about 2 log2(P) for collectives over P ranks, not P - 1.
//!
//! The rank that needs a connection first dials ([`dial`]); the other accepts at any time, whatever its program is doing
//! ([`answer`]), so that ranks never have to reach the same call to connect. Where two dial each other at once, the lower
//! rank's connection is kept.
//!
//! ```text
//! rank a                       rank b
//!   handshake (data)      ->   admitted, unless b is lower and on its way to a itself
//!   one byte: I have seen it
//!   memory, if they share  <-> (see `shm`)
//! ```
//!
//! Neither rank uses the connection before the other is bound to it: the rank that dials sends its byte when it has the
//! answer, the other waits for that byte. An attempt that is given up before then has no effect.

mod answer;
mod dial;
mod stalled;

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::base::fingerprint;
use crate::base::last_message::GOODBYE;
use crate::base::lock;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{ClientClaim, Credentials};
use crate::connection::stop::{StopOnDrop, Stopped};
use crate::connection::stream::Stream;
use crate::connection::wire::HandshakeStream;
use crate::transport::links::{OpenError, Wait};
use crate::transport::peer::PeerInfo;
use crate::transport::shm::{self, RingPair, SharedMemory};
use crate::{Result, Transport};

use self::dial::ConnectionRequest;
pub(crate) use self::stalled::StalledLink;

/// Configuration of the data connections of a rank.
pub(crate) struct Setup {
    pub(crate) own: ClientClaim,
    /// Valid for this group's rendezvous only.
    pub(crate) credentials: Credentials,
    /// By rank, this one included.
    pub(crate) peers: Arc<Vec<PeerInfo>>,
    /// This rank's means to share memory; None where it does not.
    pub(crate) host: Option<SharedMemory>,
    pub(crate) transport: Transport,
    /// How long one handshake may take.
    pub(crate) handshake: Duration,
    /// Time limit for exchanges between ranks that have proved who they are.
    pub(crate) timeout: Duration,
}

/// The data connections of one rank.
pub(crate) struct DataConnections {
    setup: Setup,
    state: Mutex<ConnectionTable>,
    changed: Condvar,
    /// Becomes readable when no new connections are wanted any more.
    stopped: Arc<Stopped>,
}

struct ConnectionTable {
    /// By rank.
    lines: Vec<ConnectionState>,
    /// Connections that this rank needs and does not have, by peer.
    wishes: BTreeMap<usize, ConnectionRequest>,
    /// The thread that makes them; `dialing` is true until it has found nothing more to do.
    dialer: Option<JoinHandle<()>>,
    dialing: bool,
    closed: bool,
    /// The last message for a peer that still dials when this rank has closed its group, or the group has failed.
    parting: Option<LastMessageBytes>,
    /// Dropped on close.
    stop: Option<StopOnDrop>,
}

/// State of the connection to one peer.
enum ConnectionState {
    Idle,
    /// This rank is dialing.
    Dialing,
    /// The peer is dialing: the number of its attempts that were admitted and have not ended. It uses at most one of
    /// them, and the last to be admitted need not be that one, so this rank dials only when all have ended.
    Answering(usize),
    Open {
        stream: Arc<Stream>,
        /// Some until the connection is fetched; the inner value is the memory beside it, if the ranks share any.
        fresh: Option<Option<RingPair>>,
    },
}

/// Which rank began an attempt to connect: this one, or the peer.
#[derive(Clone, Copy)]
enum Side {
    Dialed,
    Answered,
}

/// An encoded last message (farewell or failure report).
type LastMessageBytes = [u8; fingerprint::LEN];

/// A connection, and the shared memory beside it, if any.
type Connection = (Arc<Stream>, Option<RingPair>);

impl DataConnections {
    pub(crate) fn new(setup: Setup) -> Result<Self> {
        let (stop, stopped) = StopOnDrop::new()?;
        let state = ConnectionTable {
            lines: setup.peers.iter().map(|_| ConnectionState::Idle).collect(),
            wishes: BTreeMap::new(),
            dialer: None,
            dialing: false,
            closed: false,
            parting: None,
            stop: Some(stop),
        };
        Ok(Self { setup, state: Mutex::new(state), changed: Condvar::new(), stopped })
    }

    fn state(&self) -> MutexGuard<'_, ConnectionTable> {
        lock(&self.state)
    }

    pub(crate) fn peers(&self) -> &Arc<Vec<PeerInfo>> {
        &self.setup.peers
    }

    pub(crate) fn peer(&self, rank: usize) -> &PeerInfo {
        &self.setup.peers[rank]
    }

    /// Returns this rank's means to share memory; None where it does not.
    pub(crate) fn host(&self) -> Option<&SharedMemory> {
        self.setup.host.as_ref()
    }

    fn own_rank(&self) -> usize {
        self.setup.own.rank as usize
    }

    /// Hands out the connection to a peer, once. Requests it and returns None where there is none yet; an error where
    /// there will never be one.
    pub(crate) fn take_or_request(
        self: &Arc<Self>,
        peer: usize,
    ) -> std::result::Result<Option<Connection>, OpenError> {
        let mut state = self.state();
        if state.closed {
            return Err(OpenError::Closed);
        }
        match state.lines.get_mut(peer) {
            Some(ConnectionState::Open { stream, fresh }) => {
                let pair = fresh.take().ok_or(OpenError::Closed)?;
                let connection = (stream.clone(), pair);
                state.wishes.remove(&peer);
                Ok(Some(connection))
            }
            Some(_) => self.request(state, peer).map(|()| None),
            None => Err(OpenError::Closed),
        }
    }

    /// Blocks until one of the connections in `waits` is made, or never will be, or `timeout` has passed.
    pub(crate) fn wait(&self, waits: &[Wait], timeout: Duration) {
        let pending = |state: &mut ConnectionTable| {
            !state.closed && !waits.iter().any(|wait| state.is_settled(wait.peer))
        };
        // Poisoned or not, the caller checks the state itself.
        drop(self.changed.wait_timeout_while(self.state(), timeout, pending));
    }

    /// Sets up the memory beside a new connection, where the two ranks share any.
    fn share(
        &self,
        peer: usize,
        wire: &mut HandshakeStream,
        deadline: Instant,
    ) -> ConnectResult<Option<RingPair>> {
        let Setup { peers, host, transport, .. } = &self.setup;
        let obstacle = peers[self.own_rank()].site.obstacle_to(&peers[peer].site);
        let (Some(host), None) = (host, obstacle) else { return Ok(None) };
        match shm::share(host, wire, deadline)? {
            Ok(pair) => Ok(Some(pair)),
            Err(obstacle) if *transport == Transport::Shm => Err(ConnectError::NoMemory(obstacle)),
            Err(obstacle) => {
                let own = self.own_rank();
                tracing::debug!("rank {own} talks to rank {peer} over TCP: {obstacle}");
                Ok(None)
            }
        }
    }

    /// Ends an attempt to connect: stores the connection if there is none yet, or records that the attempt has failed.
    ///
    /// A connection that is there is the peer's, too: it was admitted by the one rank, and the other has seen that, so
    /// whoever made it has given up every other attempt.
    fn finish_attempt(
        &self,
        peer: usize,
        side: Side,
        outcome: ConnectResult<(HandshakeStream, Option<RingPair>)>,
    ) -> ConnectResult<()> {
        let mut state = self.state();
        let (closed, parting) = (state.closed, state.parting);
        let line = &mut state.lines[peer];
        let result = match outcome {
            Ok((wire, pair)) if !closed && !matches!(line, ConnectionState::Open { .. }) => {
                *line = ConnectionState::Open { stream: wire.into_data_stream(), fresh: Some(pair) };
                Ok(())
            }
            Ok((wire, _)) => {
                line.end_attempt(side);
                // The peer may already regard the connection as established.
                if let Some(words) = parting {
                    wire.try_send(&words);
                }
                Err(ConnectError::Stopped)
            }
            Err(fault) => {
                line.end_attempt(side);
                Err(fault)
            }
        };
        drop(state);
        self.changed.notify_all();
        result
    }

    /// Stops making connections, and sends `words` to every connected peer: this rank leaves. Only where no operation was
    /// cut off: otherwise a peer would take the words for data.
    pub(crate) fn leave(&self, words: LastMessageBytes) {
        let mut state = self.state();
        state.close(Some(words));
        state.streams().for_each(|stream| stream.say(&words));
        drop(state);
        self.changed.notify_all();
    }

    /// Sends `words` on the connections to these peers, without waiting for room.
    pub(crate) fn send_last_message(&self, peers: &[usize], words: &[u8]) {
        let state = self.state();
        for peer in peers {
            if let Some(ConnectionState::Open { stream, .. }) = state.lines.get(*peer) {
                stream.say(words);
            }
        }
    }

    /// Stops making connections and ends all waiting for data: with `Read` on this rank alone, with `Both` on its peers,
    /// too. Peers that dial later get `words`, if any.
    pub(crate) fn shutdown(&self, how: Shutdown, words: Option<LastMessageBytes>) {
        let mut state = self.state();
        state.close(words);
        for stream in state.streams() {
            stream.shutdown(how);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Closes for good, and waits until the dialing thread has ended.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.close(Some(GOODBYE));
        let dialer = state.dialer.take();
        drop(state);
        self.changed.notify_all();
        if let Some(dialer) = dialer {
            // The thread never panics, and ends once `closed` is set.
            let _ = dialer.join();
        }
    }
}

impl ConnectionState {
    /// Records that an attempt has ended without a connection.
    fn end_attempt(&mut self, side: Side) {
        match (&mut *self, side) {
            (Self::Answering(attempts), Side::Answered) if *attempts > 1 => *attempts -= 1,
            (Self::Answering(_), Side::Answered) | (Self::Dialing, Side::Dialed) => *self = Self::Idle,
            _ => {}
        }
    }
}

impl ConnectionTable {
    fn close(&mut self, words: Option<LastMessageBytes>) {
        if !self.closed {
            (self.closed, self.parting) = (true, words);
        }
        self.stop = None;
    }

    fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.lines.iter().filter_map(|line| {
            if let ConnectionState::Open { stream, .. } = line { Some(&**stream) } else { None }
        })
    }

    fn is_settled(&self, peer: usize) -> bool {
        let failed = self.wishes.get(&peer).is_some_and(|wish| wish.failure.is_some());
        failed || matches!(self.lines.get(peer), Some(ConnectionState::Open { .. }))
    }
}

#[cfg(test)]
impl DataConnections {
    /// Returns the data connections of a rank that dials nobody: these, by peer.
    pub(crate) fn with(
        own: usize,
        connections: Vec<Option<(std::net::TcpStream, Option<RingPair>)>>,
    ) -> Arc<Self> {
        use crate::connection::obstacle::Obstacle;
        use crate::transport::site::Site;
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let site = Site::own(Some(Obstacle::Unwanted));
        let peer = PeerInfo { host: "here".into(), pid: 1, address, site, regroup_port: 0 };
        let (rank, world_size) = (own as u32, connections.len() as u32);
        let data_connections = Self::new(Setup {
            own: ClientClaim { rank, world_size, purpose: crate::connection::handshake::Purpose::Data },
            credentials: Credentials::new(None, ""),
            peers: Arc::new(vec![peer; connections.len()]),
            host: None,
            transport: Transport::Tcp,
            handshake: Duration::from_secs(5),
            timeout: Duration::from_secs(5),
        });
        let data_connections = data_connections.unwrap();
        for (line, connection) in data_connections.state().lines.iter_mut().zip(connections) {
            if let Some((stream, pair)) = connection {
                *line = ConnectionState::Open { stream: Arc::new(stream.into()), fresh: Some(pair) };
            }
        }
        Arc::new(data_connections)
    }

    /// Returns the ranks to which there is a connection.
    pub(crate) fn connected(&self) -> Vec<usize> {
        let state = self.state();
        let lines = state.lines.iter().enumerate();
        lines.filter(|(_, line)| matches!(line, ConnectionState::Open { .. })).map(|(rank, _)| rank).collect()
    }
}

impl std::fmt::Debug for DataConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Switchboard({} connections)", self.state().streams().count())
    }
}

#[cfg(test)]
mod tests;
