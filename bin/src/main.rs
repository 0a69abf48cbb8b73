//! The program `girandole`.
#![deny(unsafe_code)]

use std::process::ExitCode;

use cli::threads;

/// A training step allocates hundreds of small tensors; with the C library's allocator a step takes a quarter longer.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    keep_pages();
    set_threads();
    bin::main()
}

#[allow(unsafe_code, reason = "candle takes the number of its threads from the environment only")]
fn set_threads() {
    let Some(threads) = threads::choose() else { return };
    // SAFETY: called at the start of `main`, when no other thread exists that could read the environment.
    unsafe { std::env::set_var(threads::VARIABLE, threads) };
}

/// Lets the allocator keep freed memory for a minute before returning it to the system, unless the environment says
/// otherwise (`MIMALLOC_PURGE_DELAY`): each step allocates again what the one before freed, and with the allocator's
/// own, shorter delay the system zeroes thousands of pages for every step of a large model.
#[allow(unsafe_code, reason = "the allocator takes its options by functions of C only")]
fn keep_pages() {
    /// `mi_option_purge_delay` in the header of libmimalloc-sys 0.1.49.
    const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
    const MILLISECONDS: std::ffi::c_long = 60_000;
    // SAFETY: the function checks the option's number, and writes an integer that is read when memory is freed;
    // called at the start of `main`, when no other thread exists.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, MILLISECONDS) };
}
