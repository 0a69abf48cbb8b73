//! Girandole's command line, as a library: the experiments, their models, and their output files.
//!
//! The program is `girandole`; the benchmarks train the same models through this library.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "what an experiment prints is its result")]

mod backends;
pub mod cli;
pub mod comm_bench;
pub mod console;
mod devices;
pub mod error;
pub mod experiment;
pub mod experiments;
#[cfg(doctest)]
mod guide;
pub mod held;
mod interrupt;
pub mod language;
pub mod launch;
mod machine;
mod memory_check;
pub mod module_tree;
pub mod options;
mod origin;
pub mod outputs;
pub mod plan;
mod progress;
pub mod python;
pub mod rank;
mod recipe;
mod result_line;
pub mod run_log;
pub mod start;
pub mod text;
pub mod threads;
pub mod tokens;
pub mod trainer;
pub mod variables;
