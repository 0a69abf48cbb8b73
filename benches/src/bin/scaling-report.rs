//! How training scales over ranks on this machine, as a page and a JSON.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// As in the program that users run.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if let Some(code) = benches::serve() {
        return code;
    }
    let Err(error) = benches::scaling::main() else { return ExitCode::SUCCESS };
    if let Some(message) = error.message() {
        eprintln!("{message}");
    }
    ExitCode::from(error.exit_code())
}
