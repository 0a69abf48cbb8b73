//! What Apple's systems do in ways of their own.
#![allow(unsafe_code, reason = "the system's C functions have no safe form")]

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::time::Duration;

use rustix::process::Pid;

use super::arguments::variables;

/// As long as what a process is started with may be.
const LONGEST: usize = 1 << 20;
/// `TCP_RXT_CONNDROPTIME` of the system's headers: a connection's end after so many seconds of repeating in vain.
const DROP_TIME: libc::c_int = 0x80;

/// The ids of all processes that can be seen.
pub(super) fn all_processes() -> Vec<i32> {
    // SAFETY: without room it tells the number only.
    let count = unsafe { libc::proc_listallpids(null_mut(), 0) };
    // Some may be started in the meantime.
    let mut pids = vec![0i32; usize::try_from(count).unwrap_or(0) + 64];
    let bytes = libc::c_int::try_from(size_of_val(&*pids)).unwrap_or(0);
    // SAFETY: there is room for so many bytes.
    let count = unsafe { libc::proc_listallpids(pids.as_mut_ptr().cast(), bytes) };
    pids.truncate(usize::try_from(count).unwrap_or(0));
    pids
}

/// A process's variables, each ended by a zero. The system keeps those of its own programs to itself.
pub(super) fn environment(pid: Pid) -> Option<Vec<u8>> {
    let mut name = [libc::CTL_KERN, libc::KERN_PROCARGS2, pid.as_raw_pid()];
    let mut bytes = vec![0u8; LONGEST];
    let mut len = bytes.len();
    // SAFETY: the name has three parts, and there is room for `len` bytes; nothing is set.
    let status =
        unsafe { libc::sysctl(name.as_mut_ptr(), 3, bytes.as_mut_ptr().cast(), &raw mut len, null_mut(), 0) };
    if status != 0 {
        return None;
    }
    bytes.truncate(len);
    Some(variables(&bytes)?.to_vec())
}

/// The connection ends where the other side does not confirm what was sent for so long.
pub(super) fn end_when_unconfirmed(stream: &TcpStream, after: Duration) {
    let seconds = libc::c_int::try_from(after.as_secs()).unwrap_or(libc::c_int::MAX);
    let len = size_of_val(&seconds) as libc::socklen_t;
    // SAFETY: the option's value is a number of that size. Where it cannot be set, the end is noticed later.
    unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, DROP_TIME, (&raw const seconds).cast(), len)
    };
}
