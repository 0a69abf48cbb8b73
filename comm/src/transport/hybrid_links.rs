//! Links through shared memory to ranks that share it, and through sockets to all other ranks.
//!
//! A rank waits in one `poll`, on its wake-up and its sockets. A socket beside shared memory carries only the peer's last
//! message (farewell or failure report). When that arrives, or the socket ends, nothing more will come through the
//! memory: the peer has left or died, or this rank's group has failed.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::base::timespec::timespec;
use crate::transport::links::{Closed, Links, OpenError, Wait};
use crate::transport::shm::{RingPair, WakeUp, fence_before_recheck};
use crate::transport::tcp::links::TcpLinks;

/// How often to retry before sleeping, where every rank has a core: some tens of microseconds.
const SPINS: u32 = 1000;

pub(crate) struct HybridLinks {
    sockets: TcpLinks,
    /// By rank: the open streams that use shared memory.
    pairs: Vec<Option<RingPair>>,
    /// Number of open streams that do not.
    others: usize,
    wake_up: Arc<WakeUp>,
    crowded: bool,
}

impl HybridLinks {
    /// `wake_up` is the one that wakes this rank; `crowded`: there are more ranks than cores.
    pub(crate) fn new(sockets: TcpLinks, wake_up: Arc<WakeUp>, crowded: bool) -> Self {
        Self { sockets, pairs: Vec::new(), others: 0, wake_up, crowded }
    }

    fn pair(&mut self, peer: usize) -> Option<&mut RingPair> {
        self.pairs.get_mut(peer).and_then(Option::as_mut)
    }

    /// Sets or clears the flags that ask the peers to signal this rank's wake-up. Returns true if one of `waits` is already
    /// ready.
    fn request_wakeups(&mut self, waits: &[Wait], expect: bool) -> bool {
        for wait in waits {
            let Some(pair) = self.pair(wait.peer) else { continue };
            if wait.read {
                pair.reader.expect_bytes(expect);
            }
            if wait.write {
                pair.writer.expect_room(expect);
            }
        }
        if !expect {
            return false;
        }
        fence_before_recheck();
        waits.iter().any(|wait| match self.pair(wait.peer) {
            Some(pair) => {
                pair.gone
                    || wait.read && pair.reader.has_new_bytes() != Ok(false)
                    || wait.write && pair.writer.has_room() != Ok(false)
            }
            None => false,
        })
    }

    fn sleep(&mut self, waits: &[Wait], timeout: Duration) {
        let mut polled = Vec::with_capacity(waits.len() + 1);
        polled.push(PollFd::from_borrowed_fd(self.wake_up.fd(), PollFlags::IN));
        for wait in waits {
            let shared = self.pairs.get(wait.peer).is_some_and(Option::is_some);
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, wait.read || shared);
            events.set(PollFlags::OUT, wait.write && !shared);
            match self.sockets.stream(wait.peer) {
                Ok(stream) => polled.push(PollFd::from_borrowed_fd(stream.as_fd(), events)),
                // The next try reports it.
                Err(Closed) => return,
            }
        }
        // An error or a signal counts as waking up early.
        if !matches!(poll(&mut polled, Some(&timespec(timeout))), Ok(1..)) {
            return;
        }
        if !polled[0].revents().is_empty() {
            self.wake_up.reset();
        }
        for (polled, wait) in polled[1..].iter().zip(waits) {
            if let Some(pair) = self.pairs.get_mut(wait.peer).and_then(Option::as_mut) {
                pair.gone |= !polled.revents().is_empty();
            }
        }
    }
}

impl Links for HybridLinks {
    fn open(&mut self, peer: usize) -> Result<bool, OpenError> {
        if self.sockets.is_open(peer) {
            return Ok(true);
        }
        let Some(pair) = self.sockets.fetch(peer)? else { return Ok(false) };
        self.others += usize::from(pair.is_none());
        if self.pairs.len() <= peer {
            self.pairs.resize_with(peer + 1, || None);
        }
        self.pairs[peer] = pair;
        Ok(true)
    }

    fn last_error(&self, peer: usize) -> Option<String> {
        self.sockets.last_error(peer)
    }

    fn try_send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        match self.pair(peer) {
            Some(RingPair { gone: true, .. }) => Err(Closed),
            Some(pair) => pair.writer.write(head, body),
            None => self.sockets.try_send(peer, head, body),
        }
    }

    fn try_recv(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        let Some(pair) = self.pair(peer) else { return self.sockets.try_recv(peer, into) };
        match pair.reader.read(into) {
            // Data that was written before the end is read first. The socket carries the last message, no data.
            Ok(0) if pair.gone => Err(Closed),
            other => other,
        }
    }

    fn peek(&mut self, peer: usize) -> Option<Result<&[u8], Closed>> {
        let RingPair { reader, gone, .. } = self.pair(peer)?;
        Some(match reader.peek() {
            Ok([]) if *gone => Err(Closed),
            other => other,
        })
    }

    fn consume(&mut self, peer: usize, len: usize) {
        if let Some(pair) = self.pair(peer) {
            pair.reader.consume(len);
        }
    }

    fn has_separate_control_channel(&self, peer: usize) -> bool {
        self.pairs.get(peer).is_some_and(Option::is_some)
    }

    fn try_recv_last_message(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        if self.has_separate_control_channel(peer) {
            self.sockets.try_recv(peer, into)
        } else {
            self.try_recv(peer, into)
        }
    }

    fn wait(&mut self, waits: &[Wait], timeout: Duration) {
        if waits.iter().all(|wait| self.pairs.get(wait.peer).is_none_or(Option::is_none)) {
            return self.sockets.wait(waits, timeout);
        }
        if !self.request_wakeups(waits, true) {
            self.sleep(waits, timeout);
        }
        self.request_wakeups(waits, false);
    }

    fn spins(&self) -> u32 {
        // Polling a socket takes much longer than reading memory.
        if self.others == 0 && !self.crowded { SPINS } else { self.sockets.spins() }
    }
}
