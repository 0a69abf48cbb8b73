//! How much memory this process has held, and how much there is.

use super::system::memory;

/// The most memory that this process has held at once (its peak resident set), in bytes, where the system tells it.
///
/// ```
/// assert!(comm::peak_rss_bytes() > Some(100_000));
/// ```
pub fn peak_rss_bytes() -> Option<u64> {
    memory::peak_rss_bytes()
}

/// Lets [`peak_rss_bytes`] begin anew from what the process holds now; false where the system cannot. Linux can.
///
/// ```
/// let known = comm::peak_rss_bytes();
/// assert!(!comm::reset_peak_rss() || known.is_some());
/// ```
pub fn reset_peak_rss() -> bool {
    memory::reset_peak_rss()
}

/// The memory of this machine, in bytes, where the system tells it.
///
/// ```
/// assert!(comm::total_memory_bytes() > comm::peak_rss_bytes());
/// ```
pub fn total_memory_bytes() -> Option<u64> {
    memory::total_memory_bytes()
}

/// Bytes of memory that new processes can have without others being pushed out; where the system does not tell it, all that this machine
/// has.
///
/// ```
/// assert!(comm::available_memory_bytes() <= comm::total_memory_bytes());
/// ```
pub fn available_memory_bytes() -> Option<u64> {
    memory::available_memory_bytes().or_else(total_memory_bytes)
}
