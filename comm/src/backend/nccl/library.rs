//! NCCL's version and error messages.

#![allow(unsafe_code, reason = "NCCL is a C library")]

use std::ffi::{CStr, c_char};
use std::ptr::null_mut;

use candle_core::cuda::cudarc::nccl::{result, sys};

use crate::{Error, Result};

/// Returns NCCL's version, for example `2.27.3`.
pub(super) fn version() -> Option<String> {
    let number = result::get_nccl_version().ok()?;
    Some(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

/// Returns an error for a code that is neither success nor work in progress; `comm` may be null.
pub(super) fn check(call: &str, code: sys::ncclResult_t, comm: sys::ncclComm_t) -> Result<()> {
    use sys::ncclResult_t::{ncclInProgress, ncclSuccess};
    if code == ncclSuccess || code == ncclInProgress {
        return Ok(());
    }
    // SAFETY: for each code there is a text that lives as long as the library.
    let what = unsafe { text(sys::ncclGetErrorString(code)) };
    // SAFETY: NCCL does not read the communicator, and the text is copied before the next call of this thread.
    let detail = unsafe { text(sys::ncclGetLastError(comm)) };
    let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
    Err(Error::system(call, format!("NCCL says: {what} ({code:?}, {}){detail}", code as u32)))
}

/// As [`check`], for functions wrapped by [`result`].
pub(super) fn check_result<T>(call: &str, result: std::result::Result<T, result::NcclError>) -> Result<T> {
    result.map_err(|error| match check(call, error.0, null_mut()) {
        Err(error) => error,
        Ok(()) => Error::system(call, "NCCL gave no reason"),
    })
}

/// # Safety
/// `start` is null, or a C string of the library's.
unsafe fn text(start: *const c_char) -> String {
    if start.is_null() {
        return String::new();
    }
    // SAFETY: the caller's obligation.
    unsafe { CStr::from_ptr(start) }.to_string_lossy().trim().replace('\n', "; ")
}
