//! What a communicator has done.

/// What a communicator has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Operations that ended well.
    pub operations: u64,
    /// Bytes of payload sent to other ranks.
    pub bytes_sent: u64,
    /// Bytes of payload received from other ranks.
    pub bytes_received: u64,
    /// Time spent inside operations, in nanoseconds.
    pub busy_ns: u64,
}
