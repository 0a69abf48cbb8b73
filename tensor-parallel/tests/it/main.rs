//! The tests of `tensor-parallel` through its public items, in one program, which is quicker built than one for each file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod checkpoint;
mod clip;
mod counts;
mod equality;
mod experts;
mod files;
mod layers;
mod mistakes;
mod vocabulary;
