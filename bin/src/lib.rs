//! Girandole's command line, as a library: its commands and the documents' experiments.
//!
//! The program is `girandole`; the benchmarks train the same models through this library. Each command is a clap struct of
//! options, and an experiment is such a struct with the traits [`cli::Command`] and [`cli::Experiment`]:
//! ```
//! use bin::documents::handbook::ddp_mlp::DdpMlpOptions;
//! use cli::Command;
//! assert_eq!((DdpMlpOptions::NAME, DdpMlpOptions::WORLD_SIZE), ("ddp-mlp", 2));
//! assert!(bin::cli::commands().find_subcommand("ddp-mlp").is_some());
//! ```
//!
//! Read it in this order: [`cli`], the list of commands; [`documents::handbook::ddp_mlp`], a small experiment; the other [`documents`].
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "what an experiment prints is its result")]

pub mod cli;
pub mod documents;
#[cfg(doctest)]
mod guide;
