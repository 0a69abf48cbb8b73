//! The tests of `fsdp` through its public items, in one program, which is quicker built than one for each file. Tests that listen to the
//! log have programs of their own: other threads decide which events there are.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod batch_norm;
mod detached;
mod larger_model;
mod meanwhile;
mod mixed;
mod one_process;
mod other_axes;
mod reading;
mod replicas;
mod sharded_state;
mod without_gradient;
