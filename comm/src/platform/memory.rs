//! Memory use of this process, and memory that it may use.

use super::system::memory;
use super::usable_memory::UsableMemory;

/// Returns the most memory that this process has held at once (its peak resident set), in bytes; None where the system
/// does not report it.
///
/// ```
/// assert!(comm::internal::peak_rss_bytes() > Some(100_000));
/// ```
pub fn peak_rss_bytes() -> Option<u64> {
    memory::peak_rss_bytes()
}

/// Resets [`peak_rss_bytes`] to what the process holds now. Returns false where the system cannot; Linux can.
///
/// ```
/// let known = comm::internal::peak_rss_bytes();
/// assert!(!comm::internal::reset_peak_rss() || known.is_some());
/// ```
pub fn reset_peak_rss() -> bool {
    memory::reset_peak_rss()
}

/// Returns the memory that all processes can use here; `None` where the system does not report it.
///
/// ```
/// let memory = comm::internal::total_memory().map(|memory| memory.bytes);
/// assert!(memory > comm::internal::peak_rss_bytes());
/// ```
pub fn total_memory() -> Option<UsableMemory> {
    memory::total_memory()
}

/// Returns the memory that new processes can use without swapping; where the system does not report that, all that there
/// is.
///
/// ```
/// let [available, total] = [comm::internal::available_memory(), comm::internal::total_memory()];
/// assert!(available.map(|memory| memory.bytes) <= total.map(|memory| memory.bytes));
/// ```
pub fn available_memory() -> Option<UsableMemory> {
    memory::available_memory().or_else(total_memory)
}
