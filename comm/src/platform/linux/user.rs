//! User of the process at the other end of a unix socket. Between containers that share a network but not their
//! processes, the peer's process id may be 0 here; rustix assumes that it never is, so the system is called directly.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

/// Returns false where the process at the other end belongs to another user, or the user is unknown.
pub(crate) fn is_of_this_user(socket: BorrowedFd<'_>) -> bool {
    let mut other = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the system writes at most `size` bytes, the size of `other`, which is made of numbers only.
    let status = unsafe {
        let place = (&raw mut other).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut size)
    };
    status == 0 && other.uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn this_process_is_of_this_user() {
        let (one, other) = UnixStream::pair().unwrap();
        assert!(is_of_this_user(one.as_fd()) && is_of_this_user(other.as_fd()));
        assert!(!is_of_this_user(std::fs::File::open("/dev/null").unwrap().as_fd()));
    }
}
