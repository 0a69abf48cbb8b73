//! What macOS and Apple's other systems do in their own way.
#![allow(unsafe_code, reason = "the system's C functions have no safe form")]

use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::null_mut;

use socket2::SockRef;

/// Bytes per unit of `ru_maxrss`.
pub(super) const PEAK_UNIT: u64 = 1;

/// Returns an identifier that changes with each boot.
pub(super) fn boot_id() -> Option<Vec<u8>> {
    let mut id = [0u8; 64];
    let mut len = id.len();
    let name = c"kern.bootsessionuuid";
    // SAFETY: the name ends with a zero, and there is room for `len` bytes; nothing is set.
    let status =
        unsafe { libc::sysctlbyname(name.as_ptr(), id.as_mut_ptr().cast(), &raw mut len, null_mut(), 0) };
    id.get(..len).filter(|id| status == 0 && !id.is_empty()).map(<[u8]>::to_vec)
}

/// Makes a write to this connection, once it is closed, return an error instead of raising a signal.
pub(super) fn without_signals(stream: &TcpStream) {
    // Fails where the peer has closed the connection; Rust programs ignore the signal by default.
    let _ = SockRef::from(stream).set_nosigpipe(true);
}

/// Returns false where the process at the other end of a unix socket belongs to another user, or the user is unknown.
pub(crate) fn is_of_this_user(socket: BorrowedFd<'_>) -> bool {
    let (mut user, mut group) = (libc::uid_t::MAX, libc::gid_t::MAX);
    // SAFETY: the system writes these two numbers.
    let status = unsafe { libc::getpeereid(socket.as_raw_fd(), &raw mut user, &raw mut group) };
    status == 0 && user == rustix::process::geteuid().as_raw()
}
