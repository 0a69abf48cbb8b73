//! All benches. `cargo bench -- GROUP` runs one group.
#![allow(missing_docs, clippy::expect_used, reason = "a bench that cannot run has nothing to report")]

mod checkpoint;
mod collectives;
mod ddp_linear;
mod launch;
mod sampling;
mod training;

use std::process::ExitCode;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};

/// As in the program that users run.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

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
    training::data_parallel(&mut criterion);
    training::sharded(&mut criterion);
    training::tensor_parallel(&mut criterion);
    training::pipeline(&mut criterion);
    launch::bench(&mut criterion);
    checkpoint::bench(&mut criterion);
    ddp_linear::bench(&mut criterion);
    criterion.final_summary();
    ExitCode::SUCCESS
}

/// A group whose benches are measured for about so long each, beside what starting ranks takes.
fn group<'a>(criterion: &'a mut Criterion, name: &str, milliseconds: u64) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    let time = Duration::from_millis(milliseconds);
    group.sample_size(10).warm_up_time(time / 5).measurement_time(time);
    group
}
