//! Tests of the command `fsdp-mlp`: real processes, compared with PyTorch and with repeated runs.

mod communication;
mod files;
mod input;
#[cfg(target_os = "linux")]
mod killed;
mod output;
mod pytorch;
mod scaling;

const FSDP: crate::common::Girandole = crate::common::Girandole("fsdp-mlp");

/// A small model that trains quickly.
const SMALL: [&str; 8] = ["--features", "24", "--hidden", "50", "--batch-size", "4", "--param-dtype", "f32"];
