//! Tests of `training`'s public API, in one program, which builds faster than one for each file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod adam;
mod checkpoint;
mod clip;
mod gradient_check;
mod init;
mod low_bits;
mod muon;
mod recompute;
mod sgd;
mod state;
mod step_scaled;
