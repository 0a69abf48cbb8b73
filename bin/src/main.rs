//! The program `girandole`.
#![deny(unsafe_code)]

use std::process::ExitCode;

use girandole::threads;

/// A step allocates hundreds of small tensors; with the C library's allocator it takes a quarter longer.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    set_threads();
    girandole::cli::main()
}

#[allow(unsafe_code, reason = "candle takes the number of its threads from the environment only")]
fn set_threads() {
    let Some(threads) = threads::choose() else { return };
    // SAFETY: this is the first thing that `main` does, so there is no other thread that could read the environment.
    unsafe { std::env::set_var(threads::VARIABLE, threads) };
}
