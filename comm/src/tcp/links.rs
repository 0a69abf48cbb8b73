//! The data connections: one to each peer, never blocking.

use std::io::IoSlice;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use crate::last_words::FAREWELL;
use crate::links::{Closed, Links, Wait};

/// Bytes read at once where less is asked for, so that an announcement and a small tensor are one read.
const READ_AHEAD: usize = 64 * 1024;

/// By rank; none for this one.
pub(crate) type Streams = Vec<Option<TcpStream>>;

pub(crate) struct TcpLinks {
    streams: Arc<Streams>,
    inboxes: Vec<Inbox>,
    spins: u32,
    segment: usize,
}

/// Bytes that have been read and not yet asked for.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl TcpLinks {
    /// `spins`, `segment`: see [`Links::spins`] and [`Links::segment`].
    pub(crate) fn new(streams: Arc<Streams>, spins: u32, segment: usize) -> Self {
        let inboxes = streams.iter().map(|_| Inbox::default()).collect();
        Self { streams, inboxes, spins, segment }
    }

    pub(crate) fn stream(&self, peer: usize) -> Result<&TcpStream, Closed> {
        self.streams.get(peer).and_then(Option::as_ref).ok_or(Closed)
    }
}

/// Tells every peer that this rank leaves. Only where no operation was cut off: then a peer would take it for data.
pub(super) fn say_farewell(streams: &Streams) {
    streams.iter().flatten().for_each(|stream| say(stream, &FAREWELL));
}

/// Says something on a connection without waiting.
pub(super) fn say(stream: &TcpStream, words: &[u8]) {
    // A peer that takes nothing now, or has left itself, learns it otherwise.
    let _ = send(stream, words, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

impl Inbox {
    fn take(&mut self, into: &mut [u8]) -> usize {
        let len = into.len().min(self.end - self.start);
        into[..len].copy_from_slice(&self.bytes[self.start..self.start + len]);
        self.start += len;
        len
    }
}

impl Links for TcpLinks {
    fn try_send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let parts = [IoSlice::new(head), IoSlice::new(body)];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // An empty body is nothing that any reader waits for.
        match sendmsg(self.stream(peer)?, &parts, &mut SendAncillaryBuffer::default(), flags) {
            Ok(sent) => Ok(sent),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(_) => Err(Closed),
        }
    }

    fn try_recv(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let read_ahead = into.len() < READ_AHEAD;
        let stream = self.streams.get(peer).and_then(Option::as_ref).ok_or(Closed)?;
        let inbox = self.inboxes.get_mut(peer).ok_or(Closed)?;
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
        match recv(stream, target, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(Closed),
            Ok((got, _)) if read_ahead => {
                (inbox.start, inbox.end) = (0, got);
                Ok(inbox.take(into))
            }
            Ok((got, _)) => Ok(got),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(_) => Err(Closed),
        }
    }

    fn park(&mut self, waits: &[Wait], timeout: Duration) {
        let mut polled = Vec::with_capacity(waits.len());
        for wait in waits {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, wait.read);
            events.set(PollFlags::OUT, wait.write);
            match self.stream(wait.peer) {
                Ok(stream) => polled.push(PollFd::from_borrowed_fd(stream.as_fd(), events)),
                // The next try will say so.
                Err(Closed) => return,
            }
        }
        // An error or a signal is like waking up early.
        let _ = poll(&mut polled, Some(&timespec(timeout)));
    }

    fn spins(&self) -> u32 {
        self.spins
    }

    fn segment(&self) -> usize {
        self.segment
    }
}

/// A time-out as the system takes it, an hour at most.
pub(crate) fn timespec(timeout: Duration) -> Timespec {
    let timeout = timeout.min(Duration::from_secs(3600));
    Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) }
}
