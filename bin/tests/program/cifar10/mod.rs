//! Tests of the command `cifar10`: real processes, compared with PyTorch and with repeated runs.

mod data;
mod input;
mod output;
mod pytorch;
#[cfg(target_os = "linux")]
mod session;

const CIFAR10: crate::common::Girandole = crate::common::Girandole("cifar10");

/// A run of a few steps.
const SHORT: [&str; 6] = ["--samples", "40", "--test-samples", "21", "--epochs", "1"];
