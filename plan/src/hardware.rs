//! Hardware of the ranks: network, computation, memory.

use crate::forecast::Network;

/// Hardware of the ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Hardware {
    /// Network between ranks.
    pub network: Network,
    /// Operations per second of a rank.
    pub flops: f64,
    /// Bytes per second that a rank's optimizer reads and writes.
    pub memory_bandwidth: f64,
}

impl Hardware {
    /// Returns the seconds of an optimizer with so many numbers of state per parameter, of `width` bytes each: parameter
    /// and state are read and written, the gradient is read.
    pub(crate) fn optimizer_s(&self, numbers: u64, width: u64) -> f64 {
        ((3 + 2 * numbers) * width) as f64 / self.memory_bandwidth
    }
}
