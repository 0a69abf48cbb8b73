//! The tests of `ddp` through its public items, in one program, which is quicker built than one for each file. Tests that listen to the
//! log have programs of their own: other threads decide which events there are.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod buffers;
mod check;
mod clip;
mod dead_ranks;
mod equality;
mod failure;
mod gradients;
mod hooks;
mod join;
mod memory;
mod models;
mod overlap;
mod recomputed;
mod regroup;
mod weighted;
