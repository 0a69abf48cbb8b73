//! Girandole's command line, as a library: its commands and the experiments.
//!
//! The program is `girandole`; the benchmarks train the same models through this library.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "what an experiment prints is its result")]

pub mod cli;
pub mod experiments;
#[cfg(doctest)]
mod guide;
