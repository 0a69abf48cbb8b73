//! The scaling report: measures how training scales over ranks on this machine, and writes an HTML page and a JSON
//! file.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// The same allocator as in the program.
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
