//! Shared memory whose name is removed at once: it is freed with the last process that holds it, however that process
//! ends.
#![allow(unsafe_code, reason = "the system's C functions have no safe form")]

use std::ffi::CString;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::fs::{fstat, ftruncate};
use rustix::io::{Errno, Result};

/// Creates memory of this size, all zeros. On macOS its size can be set only once: nobody can shrink the memory while
/// others have mapped it.
pub(crate) fn create(size: usize) -> Result<OwnedFd> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|_| Errno::IO)?;
    // 27 characters; macOS allows 31.
    let name = format!("/girandole-{:016x}", u64::from_be_bytes(random));
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    let file = open(&name)?;
    let sized = ftruncate(&file, size as u64);
    // SAFETY: the name ends with a zero.
    unsafe { libc::shm_unlink(name.as_ptr()) };
    sized.map(|()| file)
}

/// Opens the memory with a descriptor that is closed when this process executes another program.
fn open(name: &CString) -> Result<OwnedFd> {
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
    // SAFETY: the name ends with a zero. The mode is passed as C passes it.
    match unsafe { libc::shm_open(name.as_ptr(), flags, 0o600 as libc::c_uint) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        // SAFETY: it was just opened, and nobody else has it.
        file => Ok(unsafe { OwnedFd::from_raw_fd(file) }),
    }
}

/// Fails if the file does not have this size.
pub(crate) fn check(file: &OwnedFd, size: usize) -> Result<()> {
    (usize::try_from(fstat(file)?.st_size) == Ok(size)).then_some(()).ok_or(Errno::INVAL)
}
