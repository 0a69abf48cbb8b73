//! `launch::run` in a program that uses nothing else: this one, which starts itself by hand, under launchers, and with
//! the environment of schedulers.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

#[cfg(target_os = "linux")]
mod endings;
#[cfg(target_os = "linux")]
mod nested;
#[cfg(target_os = "linux")]
#[path = "../../../bin/tests/common/port.rs"]
mod port;
#[cfg(target_os = "linux")]
mod process;
mod program;
#[cfg(target_os = "linux")]
mod starters;

use std::process::ExitCode;

#[cfg(target_os = "linux")]
const TESTS: [(&str, fn()); 12] = [
    ("by hand", starters::by_hand),
    ("under torchrun", starters::torchrun),
    ("under Slurm", starters::slurm),
    ("under Open MPI", starters::open_mpi),
    ("under MPICH", starters::mpich),
    ("under Kubeflow", starters::kubeflow),
    ("under a launcher", starters::launcher),
    ("errors", endings::errors),
    ("what cannot be used", endings::what_cannot_be_used),
    ("signals", endings::signals),
    ("nobody reads", endings::nobody_reads),
    ("spawn in a worker", nested::all),
];

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(program::ROLE) {
        return program::main(&role);
    }
    #[cfg(target_os = "linux")]
    for (name, test) in TESTS {
        test();
        println!("run {name}: ok");
    }
    ExitCode::SUCCESS
}
