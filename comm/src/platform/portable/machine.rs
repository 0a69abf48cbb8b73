//! Identity of the machine that this process runs on.

/// Returns an identifier of the running kernel's boot: processes that see the same one run on the same machine, whatever
/// its host name.
pub(crate) fn boot_id() -> Option<Vec<u8>> {
    super::apple::boot_id()
}

/// Always 0: there are no network namespaces.
pub(crate) fn network() -> u64 {
    0
}
