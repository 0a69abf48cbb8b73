//! Links: what the executor needs of a transport, which is an ordered, reliable, non-blocking stream of bytes to and from
//! each peer.

use std::time::Duration;

use crate::base::last_message::LastMessage;

/// The stream to or from a peer has ended or broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closed;

/// Why there is no stream to a peer, and none will be made.
#[derive(Debug, Clone)]
pub(crate) enum OpenError {
    /// This rank has closed its group, or the group has failed.
    Closed,
    /// The peer has closed its group, or its group has failed: its last message.
    Left(LastMessage),
    /// The peer cannot be reached: the reason.
    Unreachable(String),
    /// This process cannot make the stream: the reason.
    Here(String),
}

/// A stream that the executor waits for, and in which direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) peer: usize,
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// One rank's ends of the streams to all its peers.
pub(crate) trait Links: Send {
    /// Makes sure that there is a stream to and from a peer. Returns true when it can be used, false while it is being
    /// made. Costs nothing where there is one already.
    fn open(&mut self, _peer: usize) -> Result<bool, OpenError> {
        Ok(true)
    }

    /// Returns why a stream that is still being made is not there yet; None for a stream that is open.
    fn last_error(&self, _peer: usize) -> Option<String> {
        None
    }

    /// Sends `head`, then `body`, as far as the stream has room. Returns the number of bytes taken, 0 where there is no
    /// room now.
    fn try_send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed>;

    /// Fills `into`, which is not empty, with bytes that have arrived. Returns their number, 0 where there are none now.
    fn try_recv(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed>;

    /// Returns bytes that have arrived, for use in place; None where the transport can only copy them out.
    fn peek(&mut self, _peer: usize) -> Option<Result<&[u8], Closed>> {
        None
    }

    /// Removes the first `len` bytes that [`Links::peek`] has returned.
    fn consume(&mut self, _peer: usize, _len: usize) {}

    /// Returns true where a rank's last message (farewell or failure report) arrives on another channel than its data, so
    /// that it can be read even if data was cut off.
    fn has_separate_control_channel(&self, _peer: usize) -> bool {
        false
    }

    /// As [`Links::try_recv`], for the last message.
    fn try_recv_last_message(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        self.try_recv(peer, into)
    }

    /// Blocks until one of `waits` can proceed, something else wakes this rank, or `timeout` has passed.
    fn wait(&mut self, waits: &[Wait], timeout: Duration);

    /// Returns how often to retry before [`Links::wait`]: worth it where the peer runs on another core.
    fn spins(&self) -> u32;
}
