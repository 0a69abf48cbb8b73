//! Tests of `tensor-parallel-mlp` and `tensor-parallel-transformer`: real processes, compared with PyTorch and with
//! each other.

#[cfg(target_os = "linux")]
mod faults;
mod files;
mod input;
mod output;
mod pytorch;
#[cfg(target_os = "linux")]
mod resume;

const MLP: crate::common::Girandole = crate::common::Girandole("tensor-parallel-mlp");
const TRANSFORMER: crate::common::Girandole = crate::common::Girandole("tensor-parallel-transformer");

/// Sizes for quick runs.
const SMALL_MLP: [&str; 6] = ["--hidden-size", "16", "--samples", "40", "--batch-size", "8"];
const SMALL_TRANSFORMER: [&str; 16] = [
    "--d-model", "16", "--num-heads", "4", "--d-ff", "24", "--vocab-size", "32", "--length", "9",
    "--samples", "24", "--batch-size", "6", "--epochs", "2",
];
