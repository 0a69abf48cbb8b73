//! Tests of `training`'s public API, in one program, which builds faster than one for each file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod adam;
mod attention;
mod checkpoint;
mod clip;
mod documents;
mod finite_differences;
mod gradient_check;
mod init;
mod llama;
mod low_bits;
mod op;
mod picture;
mod precision;
mod self_attention;
mod sgd;
mod state;
mod step_scaled;
