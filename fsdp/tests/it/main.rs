//! Integration tests of `fsdp` through its public items, in a single program, which builds faster than one per file. Tests
//! that capture log events are separate programs, because other threads influence which events are enabled.
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
