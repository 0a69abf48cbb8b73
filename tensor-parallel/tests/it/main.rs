//! The tests of `tensor-parallel` through its public items, in one program, which is quicker built than one for each file. Tests that listen to the
//! log have programs of their own: other threads decide which events there are.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod checkpoint;
mod clip;
mod equality;
mod experts;
mod files;
mod layers;
mod mistakes;
mod recomputed;
mod vocabulary;
