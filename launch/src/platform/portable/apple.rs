//! System calls that are specific to Apple's systems.
#![allow(unsafe_code, reason = "the system's C functions have no safe form")]

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::time::Duration;

use rustix::process::Pid;

use super::arguments::variables;

/// Maximum size of a process's arguments and environment, in bytes.
const LONGEST: usize = 1 << 20;
/// `TCP_RXT_CONNDROPTIME` of the system headers: seconds of unsuccessful retransmission after which a connection is
/// dropped.
const DROP_TIME: libc::c_int = 0x80;

/// Returns the ids of all processes that are visible.
pub(super) fn all_processes() -> Vec<i32> {
    // SAFETY: without a buffer the function only returns the number of processes.
    let count = unsafe { libc::proc_listallpids(null_mut(), 0) };
    // More processes may be started in the meantime.
    let mut pids = vec![0i32; usize::try_from(count).unwrap_or(0) + 64];
    let bytes = libc::c_int::try_from(size_of_val(&*pids)).unwrap_or(0);
    // SAFETY: the buffer has room for `bytes` bytes.
    let count = unsafe { libc::proc_listallpids(pids.as_mut_ptr().cast(), bytes) };
    pids.truncate(usize::try_from(count).unwrap_or(0));
    pids
}

/// Returns a process's environment variables, each ended by a zero byte. The system does not show those of its own
/// programs.
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

/// Makes the connection fail if the other side does not acknowledge sent data for this long.
pub(super) fn end_when_unconfirmed(stream: &TcpStream, after: Duration) {
    let seconds = libc::c_int::try_from(after.as_secs()).unwrap_or(libc::c_int::MAX);
    let len = size_of_val(&seconds) as libc::socklen_t;
    // SAFETY: the option's value is a number of that size. If it cannot be set, the loss is noticed later.
    unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, DROP_TIME, (&raw const seconds).cast(), len)
    };
}
