//! What Apple's systems do in ways of their own, by Linux's means: so the rest of the portable way can be tested there.

#[path = "../linux/user.rs"]
mod user;

use std::net::TcpStream;

pub(crate) use user::is_of_this_user;

/// What differs from boot to boot.
pub(super) fn boot_id() -> Option<Vec<u8>> {
    std::fs::read("/proc/sys/kernel/random/boot_id").ok()
}

/// Programs in Rust ignore the signal unless they ask for it.
pub(super) fn without_signals(_: &TcpStream) {}

/// Bytes in what the system calls the peak of a process's memory.
pub(super) const PEAK_UNIT: u64 = 1024;
