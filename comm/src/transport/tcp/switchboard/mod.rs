//! The data connections of one rank: made when they are first needed, and then kept. So a rank holds as many as it has
//! peers in what it runs, about 2 log2(P) for collectives over P ranks, not P - 1.
//!
//! Who needs a connection first makes it ([`dial`]); the other rank takes it at any time, whatever its program is doing
//! ([`answer`]): no two ranks ever wait for each other to come to the same call. Where two dial each other at once, the
//! lower rank's connection counts.
//!
//! ```text
//! rank a                       rank b
//!   handshake (data)      ->   admitted, unless b is lower and on its way to a itself
//!   one byte: I have seen it
//!   memory, if they share  <-> (see `shm`)
//! ```
//!
//! Neither rank uses the connection before the other is bound to it: the one that dials has sent its byte when it has the
//! answer, the other waits for that byte. A try that is given up before then leaves no trace.

mod answer;
mod dial;

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::base::fingerprint;
use crate::base::last_words::FAREWELL;
use crate::base::lock::lock;
use crate::rendezvous::connection::fault::{Fault, Try};
use crate::rendezvous::connection::handshake::{Caller, Credentials};
use crate::rendezvous::connection::stream::Stream;
use crate::rendezvous::connection::wire::Wire;
use crate::rendezvous::meeting::peer::PeerInfo;
use crate::transport::links::{Unopened, Wait};
use crate::transport::shm::{self, Host, Pair};
use crate::{Error, Result, Transport};

use self::dial::Wish;

/// What a switchboard must know.
pub(crate) struct Setup {
    pub(crate) own: Caller,
    /// Good for this meeting only.
    pub(crate) credentials: Credentials,
    /// By rank, this one included.
    pub(crate) peers: Arc<Vec<PeerInfo>>,
    /// The means to share memory, where this rank does.
    pub(crate) host: Option<Host>,
    pub(crate) transport: Transport,
    /// How long one handshake may take.
    pub(crate) handshake: Duration,
    /// How long anything may take between ranks that have proved who they are.
    pub(crate) timeout: Duration,
}

/// The data connections of one rank.
pub(crate) struct Switchboard {
    setup: Setup,
    state: Mutex<State>,
    changed: Condvar,
    /// Becomes readable when nobody is interested in new connections any more.
    stopped: Arc<UnixStream>,
}

struct State {
    /// By rank.
    lines: Vec<Line>,
    /// Connections that this rank needs and does not have.
    wishes: Vec<Wish>,
    /// The thread that makes them, and whether it still does.
    dialer: Option<JoinHandle<()>>,
    dialing: bool,
    /// Connections that were admitted so far.
    admitted: u64,
    closed: bool,
    /// What a peer is told that still dials when this rank has closed its group, or the group has failed.
    parting: Option<Words>,
    /// What `stopped` is the other end of.
    stop: Option<UnixStream>,
}

/// How far the connection to one peer has come.
enum Line {
    Idle,
    /// This rank is making it.
    Dialing,
    /// The peer is making it: its so many-th admitted connection.
    Answering(u64),
    Open {
        stream: Arc<Stream>,
        /// Until it is taken into use.
        fresh: Option<Option<Pair>>,
    },
}

/// Last words.
type Words = [u8; fingerprint::LEN];

/// A connection, and the memory beside it.
type Connection = (Arc<Stream>, Option<Pair>);

impl Switchboard {
    pub(crate) fn new(setup: Setup) -> Result<Self> {
        let pair = UnixStream::pair()
            .map_err(|reason| Error::system("making a socket pair", Fault::from(reason)))?;
        let state = State {
            lines: setup.peers.iter().map(|_| Line::Idle).collect(),
            wishes: Vec::new(),
            dialer: None,
            dialing: false,
            admitted: 0,
            closed: false,
            parting: None,
            stop: Some(pair.0),
        };
        Ok(Self { setup, state: Mutex::new(state), changed: Condvar::new(), stopped: Arc::new(pair.1) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn peers(&self) -> &Arc<Vec<PeerInfo>> {
        &self.setup.peers
    }

    pub(crate) fn peer(&self, rank: usize) -> &PeerInfo {
        &self.setup.peers[rank]
    }

    /// The means to share memory, where this rank does.
    pub(crate) fn host(&self) -> Option<&Host> {
        self.setup.host.as_ref()
    }

    fn own_rank(&self) -> usize {
        self.setup.own.rank as usize
    }

    /// The connection to a peer, once; asks for it where there is none yet, and tells when it will never come.
    pub(crate) fn fetch(self: &Arc<Self>, peer: usize) -> std::result::Result<Option<Connection>, Unopened> {
        let mut state = self.state();
        if state.closed {
            return Err(Unopened::Closed);
        }
        match state.lines.get_mut(peer) {
            Some(Line::Open { stream, fresh }) => {
                let pair = fresh.take().ok_or(Unopened::Closed)?;
                let connection = (stream.clone(), pair);
                state.wishes.retain(|wish| wish.peer != peer);
                Ok(Some(connection))
            }
            Some(_) => self.wish(state, peer).map(|()| None),
            None => Err(Unopened::Closed),
        }
    }

    /// Sleeps until one of the connections that are waited for is there, or never will be.
    pub(crate) fn wait(&self, waits: &[Wait], timeout: Duration) {
        let pending =
            |state: &mut State| !state.closed && !waits.iter().any(|wait| state.is_settled(wait.peer));
        // Poisoned or not, the caller looks for itself.
        drop(self.changed.wait_timeout_while(self.state(), timeout, pending));
    }

    /// Makes the memory beside a new connection, where the two ranks share any.
    fn share(&self, peer: usize, wire: &mut Wire, deadline: Instant) -> Try<Option<Pair>> {
        let Setup { peers, host, transport, .. } = &self.setup;
        let obstacle = peers[self.own_rank()].site.obstacle_to(&peers[peer].site);
        let (Some(host), None) = (host, obstacle) else { return Ok(None) };
        match shm::share(host, wire, deadline)? {
            Ok(pair) => Ok(Some(pair)),
            Err(obstacle) if *transport == Transport::Shm => Err(Fault::NoMemory(obstacle)),
            Err(obstacle) => {
                let own = self.own_rank();
                tracing::debug!("rank {own} talks to rank {peer} over TCP: {obstacle}");
                Ok(None)
            }
        }
    }

    /// Takes the place of `line` where that is still so.
    fn conclude(
        &self,
        peer: usize,
        is_mine: impl Fn(&Line) -> bool,
        outcome: Try<(Wire, Option<Pair>)>,
    ) -> Try<()> {
        let mut state = self.state();
        let (closed, parting) = (state.closed, state.parting);
        let line = &mut state.lines[peer];
        let current = is_mine(line);
        let result = match outcome {
            Ok((wire, pair)) if current && !closed => {
                *line = Line::Open { stream: wire.into_data_stream(), fresh: Some(pair) };
                Ok(())
            }
            Ok((wire, _)) => {
                if current {
                    *line = Line::Idle;
                }
                // The peer may count on it already.
                if let Some(words) = parting {
                    wire.say(&words);
                }
                Err(Fault::Stopped)
            }
            Err(fault) => {
                if current {
                    *line = Line::Idle;
                }
                Err(fault)
            }
        };
        drop(state);
        self.changed.notify_all();
        result
    }

    /// From now on no connection is made; tells every peer that there is one to that this rank leaves, in these words. Only
    /// where no operation was cut off: then a peer would take it for data.
    pub(crate) fn leave(&self, words: Words) {
        let mut state = self.state();
        state.close(Some(words));
        state.streams().for_each(|stream| stream.say(&words));
        drop(state);
        self.changed.notify_all();
    }

    /// Says something on the connections to these peers.
    pub(crate) fn tell(&self, peers: &[usize], words: &[u8]) {
        let state = self.state();
        for peer in peers {
            if let Some(Line::Open { stream, .. }) = state.lines.get(*peer) {
                stream.say(words);
            }
        }
    }

    /// From now on no connection is made and nobody waits for data any more: with `Read` this rank alone, with `Both` its
    /// peers, too. Peers that dial are told these words, if any.
    pub(crate) fn cut(&self, how: Shutdown, words: Option<Words>) {
        let mut state = self.state();
        state.close(words);
        for stream in state.streams() {
            stream.shutdown(how);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until nothing is under way any more.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        state.close(Some(FAREWELL));
        let dialer = state.dialer.take();
        drop(state);
        self.changed.notify_all();
        if let Some(dialer) = dialer {
            // It never panics, and ends when told to.
            let _ = dialer.join();
        }
    }
}

impl State {
    fn close(&mut self, words: Option<Words>) {
        if !self.closed {
            (self.closed, self.parting) = (true, words);
        }
        // The other end of a closed pair is readable for all who wait on it.
        self.stop = None;
    }

    fn streams(&self) -> impl Iterator<Item = &Stream> {
        self.lines
            .iter()
            .filter_map(|line| if let Line::Open { stream, .. } = line { Some(&**stream) } else { None })
    }

    fn is_settled(&self, peer: usize) -> bool {
        let failed = self.wishes.iter().any(|wish| wish.peer == peer && wish.failure.is_some());
        failed || matches!(self.lines.get(peer), Some(Line::Open { .. }))
    }
}

#[cfg(test)]
impl Switchboard {
    /// One that dials nobody, with these connections, by rank.
    pub(crate) fn with(
        own: usize,
        connections: Vec<Option<(std::net::TcpStream, Option<Pair>)>>,
    ) -> Arc<Self> {
        use crate::rendezvous::{obstacle::Obstacle, site::Site};
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let site = Site::own(Some(Obstacle::Unwanted));
        let peer = PeerInfo { host: "here".into(), pid: 1, address, site, door: 0 };
        let (rank, world_size) = (own as u32, connections.len() as u32);
        let switchboard = Self::new(Setup {
            own: Caller {
                rank,
                world_size,
                purpose: crate::rendezvous::connection::handshake::Purpose::Data,
            },
            credentials: Credentials::new(None, ""),
            peers: Arc::new(vec![peer; connections.len()]),
            host: None,
            transport: Transport::Tcp,
            handshake: Duration::from_secs(5),
            timeout: Duration::from_secs(5),
        });
        let switchboard = switchboard.unwrap();
        for (line, connection) in switchboard.state().lines.iter_mut().zip(connections) {
            if let Some((stream, pair)) = connection {
                *line = Line::Open { stream: Arc::new(stream.into()), fresh: Some(pair) };
            }
        }
        Arc::new(switchboard)
    }

    /// The ranks to which there is a connection.
    pub(crate) fn connected(&self) -> Vec<usize> {
        let state = self.state();
        let lines = state.lines.iter().enumerate();
        lines.filter(|(_, line)| matches!(line, Line::Open { .. })).map(|(rank, _)| rank).collect()
    }
}

impl std::fmt::Debug for Switchboard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Switchboard({} connections)", self.state().streams().count())
    }
}

#[cfg(test)]
mod tests;
