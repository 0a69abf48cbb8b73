//! Replacement for `apple` on Linux, so that the rest of the portable implementation can be tested there.

#[path = "../linux/user.rs"]
mod user;

use std::net::TcpStream;

pub(crate) use user::is_of_this_user;

/// Returns an identifier that changes with each boot.
pub(super) fn boot_id() -> Option<Vec<u8>> {
    std::fs::read("/proc/sys/kernel/random/boot_id").ok()
}

/// Does nothing: Rust programs ignore the signal by default.
pub(super) fn without_signals(_: &TcpStream) {}

/// Bytes per unit of `ru_maxrss`.
pub(super) const PEAK_UNIT: u64 = 1024;
