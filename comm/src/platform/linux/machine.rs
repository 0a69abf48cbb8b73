//! Which machine this process runs on.

use std::fs;
use std::os::unix::fs::MetadataExt;

/// One kernel's boot: two processes that see the same one run on the same machine, whatever they call it.
pub(crate) fn boot_id() -> Option<Vec<u8>> {
    fs::read("/proc/sys/kernel/random/boot_id").ok()
}

/// The network in which unix sockets reach each other; 0 where that cannot be told.
pub(crate) fn network() -> u64 {
    fs::metadata("/proc/self/ns/net").map_or(0, |file| file.ino())
}
