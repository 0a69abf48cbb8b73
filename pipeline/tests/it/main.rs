//! Integration tests of `pipeline` through its public items, in a single program, which builds faster than one per file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod checkpoints;
mod clip;
mod copies;
mod files;
mod one_process;
mod rendezvous;
mod schedules;
mod stage_faults;
mod with_data_parallel;
