//! The program `girandole`.

use std::process::ExitCode;

fn main() -> ExitCode {
    girandole::cli::main()
}
