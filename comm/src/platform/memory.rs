//! Memory use of this process, and memory of the machine.

use super::system::memory;

/// Returns the most memory that this process has held at once (its peak resident set), in bytes; None where the system
/// does not report it.
///
/// ```
/// assert!(comm::peak_rss_bytes() > Some(100_000));
/// ```
pub fn peak_rss_bytes() -> Option<u64> {
    memory::peak_rss_bytes()
}

/// Resets [`peak_rss_bytes`] to what the process holds now. Returns false where the system cannot; Linux can.
///
/// ```
/// let known = comm::peak_rss_bytes();
/// assert!(!comm::reset_peak_rss() || known.is_some());
/// ```
pub fn reset_peak_rss() -> bool {
    memory::reset_peak_rss()
}

/// Returns the memory of this machine, in bytes; None where the system does not report it.
///
/// ```
/// assert!(comm::total_memory_bytes() > comm::peak_rss_bytes());
/// ```
pub fn total_memory_bytes() -> Option<u64> {
    memory::total_memory_bytes()
}

/// Returns the bytes of memory that new processes can use without swapping; where the system does not report that, all
/// memory of this machine.
///
/// ```
/// assert!(comm::available_memory_bytes() <= comm::total_memory_bytes());
/// ```
pub fn available_memory_bytes() -> Option<u64> {
    memory::available_memory_bytes().or_else(total_memory_bytes)
}
