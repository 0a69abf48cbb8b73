//! What the executor needs of a transport: ordered, reliable streams of bytes to each peer, never blocking.

use std::time::Duration;

use crate::base::last_words::LastWords;

/// The stream to or from a peer has ended or broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closed;

/// Why there is no stream to a peer, and will be none.
#[derive(Debug, Clone)]
pub(crate) enum Unopened {
    /// This rank closes its group, or the group has failed.
    Closed,
    /// The peer has closed its group, or its group has failed; what it says.
    Left(LastWords),
    /// The peer cannot be reached; the reason.
    Unreachable(String),
    /// This process cannot make it; the reason.
    Here(String),
}

/// A stream that the executor waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) peer: usize,
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// One rank's ends of the streams to all its peers.
pub(crate) trait Links: Send {
    /// Sees to it that there is a stream to and from a peer; true when it can be used, false while it is being made. Costs
    /// nothing where there is one.
    fn open(&mut self, _peer: usize) -> Result<bool, Unopened> {
        Ok(true)
    }

    /// What is in the way of a stream that is still being made.
    fn trouble(&self, _peer: usize) -> Option<String> {
        None
    }

    /// Hands over `head`, then `body`, as far as there is room; the number of bytes taken, 0 where there is no room now.
    fn try_send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed>;

    /// Fills `into` as far as bytes have arrived; their number, 0 where there are none now. `into` is not empty.
    fn try_recv(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed>;

    /// What has arrived and lies in memory where it can be used as it is; None where bytes can only be copied out.
    fn peek(&mut self, _peer: usize) -> Option<Result<&[u8], Closed>> {
        None
    }

    /// Takes away the first `len` bytes that [`Links::peek`] has shown.
    fn consume(&mut self, _peer: usize, _len: usize) {}

    /// True where a rank's last words come apart from its data, so that they are heard even if data was cut off.
    fn speaks_apart(&self, _peer: usize) -> bool {
        false
    }

    /// As [`Links::try_recv`], for last words.
    fn try_hear(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        self.try_recv(peer, into)
    }

    /// Sleeps until one of `waits` can go on, something else woke it, or the time is over.
    fn park(&mut self, waits: &[Wait], timeout: Duration);

    /// How often to try again before parking: pays where a peer has a core of its own.
    fn spins(&self) -> u32;
}
