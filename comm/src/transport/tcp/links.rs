//! TCP links: the data connections as the executor uses them, one to each peer used so far, never blocking.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::base::timespec::timespec;
use crate::connection::stream::Stream;
use crate::transport::links::{Closed, Links, OpenError, Wait};
use crate::transport::shm::RingPair;

use super::connections::DataConnections;

/// Least bytes to read at once; what was not asked for is buffered, so that an announcement and a small tensor are one
/// read.
const READ_AHEAD: usize = 64 * 1024;

pub(crate) struct TcpLinks {
    data_connections: Arc<DataConnections>,
    /// By rank, the connections in use. Kept here so that operations need not lock `data_connections`.
    lines: Vec<Option<PeerStream>>,
    spins: u32,
}

struct PeerStream {
    stream: Arc<Stream>,
    inbox: ReadBuffer,
}

/// Bytes that have been read from the socket and not yet been asked for.
#[derive(Default)]
struct ReadBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl TcpLinks {
    /// `spins`: see [`Links::spins`].
    pub(crate) fn new(data_connections: Arc<DataConnections>, spins: u32) -> Self {
        Self { data_connections, lines: Vec::new(), spins }
    }

    pub(crate) fn is_open(&self, peer: usize) -> bool {
        self.lines.get(peer).is_some_and(Option::is_some)
    }

    /// Starts using the connection to a peer, and the shared memory beside it, if any. Returns None while it is being
    /// made.
    pub(crate) fn fetch(&mut self, peer: usize) -> Result<Option<Option<RingPair>>, OpenError> {
        let Some((stream, pair)) = self.data_connections.take_or_request(peer)? else { return Ok(None) };
        if self.lines.len() <= peer {
            self.lines.resize_with(peer + 1, || None);
        }
        self.lines[peer] = Some(PeerStream { stream, inbox: ReadBuffer::default() });
        Ok(Some(pair))
    }

    pub(crate) fn stream(&self, peer: usize) -> Result<&Stream, Closed> {
        self.lines.get(peer).and_then(Option::as_ref).map(|line| &*line.stream).ok_or(Closed)
    }
}

impl ReadBuffer {
    fn take(&mut self, into: &mut [u8]) -> usize {
        let len = into.len().min(self.end - self.start);
        into[..len].copy_from_slice(&self.bytes[self.start..self.start + len]);
        self.start += len;
        len
    }
}

impl Links for TcpLinks {
    fn open(&mut self, peer: usize) -> Result<bool, OpenError> {
        Ok(self.is_open(peer) || self.fetch(peer)?.is_some())
    }

    fn last_error(&self, peer: usize) -> Option<String> {
        if self.is_open(peer) { None } else { Some(self.data_connections.last_error(peer)) }
    }

    fn try_send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        // An empty body needs no special case: no reader waits for it.
        match self.stream(peer)?.send(head, body) {
            Err(error) => would_block_or_closed(error.kind()),
            Ok(sent) => Ok(sent),
        }
    }

    fn try_recv(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let read_ahead = into.len() < READ_AHEAD;
        let PeerStream { stream, inbox } = self.lines.get_mut(peer).and_then(Option::as_mut).ok_or(Closed)?;
        if inbox.start < inbox.end {
            return Ok(inbox.take(into));
        }
        let target = if read_ahead {
            if inbox.bytes.is_empty() {
                inbox.bytes = vec![0; READ_AHEAD];
            }
            &mut inbox.bytes[..]
        } else {
            &mut into[..]
        };
        match stream.recv(target) {
            Ok(0) => Err(Closed),
            Ok(got) if read_ahead => {
                (inbox.start, inbox.end) = (0, got);
                Ok(inbox.take(into))
            }
            Ok(got) => Ok(got),
            Err(error) => would_block_or_closed(error.kind()),
        }
    }

    fn wait(&mut self, waits: &[Wait], timeout: Duration) {
        let mut polled = Vec::with_capacity(waits.len());
        for wait in waits {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, wait.read);
            events.set(PollFlags::OUT, wait.write);
            match self.stream(wait.peer) {
                Ok(stream) => polled.push(PollFd::from_borrowed_fd(stream.as_fd(), events)),
                // The connection is still being made.
                Err(Closed) => return self.data_connections.wait(waits, timeout),
            }
        }
        // An error or a signal counts as waking up early.
        let _ = poll(&mut polled, Some(&timespec(timeout)));
    }

    fn spins(&self) -> u32 {
        self.spins
    }
}

/// Returns 0 where the socket has no bytes, or no room, for now. Any other error is the end of the stream.
fn would_block_or_closed(error: ErrorKind) -> Result<usize, Closed> {
    match error {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(0),
        _ => Err(Closed),
    }
}
