//! Identity of the machine that this process runs on.

use std::fs;
use std::os::unix::fs::MetadataExt;

/// Returns an identifier of the running kernel's boot: processes that see the same one run on the same machine, whatever
/// its host name.
pub(crate) fn boot_id() -> Option<Vec<u8>> {
    fs::read("/proc/sys/kernel/random/boot_id").ok()
}

/// Returns an identifier of the network namespace, within which unix sockets reach each other; 0 where it is unknown.
pub(crate) fn network() -> u64 {
    fs::metadata("/proc/self/ns/net").map_or(0, |file| file.ino())
}
