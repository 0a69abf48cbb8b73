//! What a TCP connection has sent and the other side has not confirmed.

use std::time::Duration;

/// Bytes that a connection has taken to send and that were not acknowledged, and what the system knows of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendQueue {
    pub(crate) bytes: u64,
    /// How often the first of them were sent again in a row, without an answer.
    pub(crate) retransmissions: u8,
    /// Since when nothing was acknowledged.
    pub(crate) silence: Duration,
    /// The most bytes of data that go into one packet.
    pub(crate) segment: u32,
}
