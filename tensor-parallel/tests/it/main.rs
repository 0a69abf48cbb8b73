//! Integration tests of `tensor-parallel` through its public items, in a single program, which builds faster than one per
//! file. Tests that capture log events are separate programs, because other threads influence which events are enabled.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod accumulated;
mod checkpoint;
mod clip;
mod equality;
mod experts;
mod files;
mod layers;
mod mistakes;
mod recomputed;
mod vocabulary;
