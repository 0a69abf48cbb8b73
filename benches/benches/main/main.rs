//! All benches. `cargo bench -- GROUP` runs one group.
#![allow(missing_docs, clippy::expect_used, reason = "a bench that cannot run has nothing to report")]

mod collectives;
mod ddp_linear;
mod sampling;

use std::process::ExitCode;

use criterion::Criterion;

fn main() -> ExitCode {
    // This program starts itself again: as a rank, or as the command that is measured.
    if let Some(code) = benches::serve() {
        return code;
    }
    if std::env::args().nth(1).is_some_and(|argument| argument == ddp_linear::COMMAND) {
        return girandole::cli::main();
    }
    let mut criterion = Criterion::default().configure_from_args();
    sampling::bench(&mut criterion);
    collectives::bench(&mut criterion);
    ddp_linear::bench(&mut criterion);
    criterion.final_summary();
    ExitCode::SUCCESS
}
