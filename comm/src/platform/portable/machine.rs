//! Which machine this process runs on.

/// One kernel's boot: two processes that see the same one run on the same machine, whatever they call it.
pub(crate) fn boot_id() -> Option<Vec<u8>> {
    super::apple::boot_id()
}

/// A machine has one network only.
pub(crate) fn network() -> u64 {
    0
}
