//! Statistics of a communicator.

/// Operations, bytes and times of a communicator so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Operations that ended successfully.
    pub operations: u64,
    /// Bytes of payload sent to other ranks.
    pub bytes_sent: u64,
    /// Bytes of payload received from other ranks.
    pub bytes_received: u64,
    /// Time spent inside operations, in nanoseconds.
    pub busy_ns: u64,
    /// The part of `busy_ns` during which some rank that this one was to receive from had not yet begun the same
    /// operation.
    pub waited_ns: u64,
}

impl std::ops::Add for Stats {
    type Output = Self;

    /// Returns the totals of two communicators.
    fn add(self, other: Self) -> Self {
        Self {
            operations: self.operations + other.operations,
            bytes_sent: self.bytes_sent + other.bytes_sent,
            bytes_received: self.bytes_received + other.bytes_received,
            busy_ns: self.busy_ns + other.busy_ns,
            waited_ns: self.waited_ns + other.waited_ns,
        }
    }
}
