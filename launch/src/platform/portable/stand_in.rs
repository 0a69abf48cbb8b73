//! What Apple's systems do in ways of their own, by Linux's means: so the rest of the portable way can be tested there.

use std::net::TcpStream;
use std::time::Duration;

use rustix::process::Pid;

/// The ids of all processes that can be seen.
pub(super) fn all_processes() -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// A process's variables, each ended by a zero.
pub(super) fn environment(pid: Pid) -> Option<Vec<u8>> {
    std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).ok()
}

pub(super) fn end_when_unconfirmed(_: &TcpStream, _: Duration) {}
