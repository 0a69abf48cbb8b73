//! Integration tests of `ddp` through its public items, in a single program, which builds faster than one per file. Tests
//! that capture log events are separate programs, because other threads influence which events are enabled.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod buffers;
mod check;
mod check_gradient;
mod checkpoints;
mod clip;
mod dead_ranks;
mod equality;
mod failure;
mod files;
mod gradients;
mod hooks;
mod join;
mod memory;
mod models;
mod overlap;
mod recomputed;
mod regroup;
mod weighted;
