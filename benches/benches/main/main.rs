//! All benchmarks. `cargo bench -- GROUP` runs one group.
#![allow(missing_docs, clippy::expect_used, reason = "a bench that cannot run has nothing to report")]

mod checkpoint;
mod collectives;
mod ddp_linear;
mod group;
mod launch;
mod products;
mod sampling;
mod training;

use std::process::ExitCode;

use criterion::Criterion;
use group::Group;
use regex::Regex;

/// The same allocator as in the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Benches = fn(&mut Group<'_>);

/// The groups: name, approximate milliseconds of measurement per benchmark, and the function that runs them.
const GROUPS: [(&str, u64, Benches); 10] = [
    ("sampling", 1000, sampling::bench),
    ("collectives", 300, collectives::bench),
    ("products", 300, products::bench),
    ("ddp", 1000, training::data_parallel),
    ("fsdp", 1000, training::sharded),
    ("tensor-parallel", 1000, training::tensor_parallel),
    ("pipeline", 1000, training::pipeline),
    ("launch", 2000, launch::bench),
    ("checkpoint", 2000, checkpoint::bench),
    (ddp_linear::COMMAND, 3000, ddp_linear::bench),
];

fn main() -> ExitCode {
    // This program starts itself as a rank, or as the measured command.
    if let Some(code) = benches::serve() {
        return code;
    }
    if ddp_linear::is_measured() {
        return bin::main();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filter = benches::filter(&arguments);
    let is_exact = arguments.iter().any(|argument| argument == "--exact");
    if let (Some(filter), false) = (filter, is_exact)
        && let Err(error) = Regex::new(filter)
    {
        let (error, filter) = (error.to_string(), filter.escape_debug());
        let problem = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
        eprintln!(
            "error: the filter `{filter}` is no regular expression: {problem}; --exact takes it as it stands"
        );
        return ExitCode::from(2);
    }
    let mut criterion = Criterion::default().configure_from_args();
    let mut ran = false;
    for (name, milliseconds, bench) in GROUPS {
        let mut group = Group::new(&mut criterion, name, milliseconds);
        bench(&mut group);
        ran |= group.finish();
    }
    criterion.final_summary();
    match filter {
        Some(filter) if !ran => {
            let names = GROUPS.map(|(name, ..)| name).join(", ");
            eprintln!(
                "error: the filter `{filter}` matches no bench: the groups are {names}, and `--list` lists their benches"
            );
            ExitCode::from(2)
        }
        _ => ExitCode::SUCCESS,
    }
}
