//! Tests of the command `ddp-mlp`: real processes, compared with PyTorch and with repeated runs.

mod files;
mod pytorch;

const MLP: crate::common::Girandole = crate::common::Girandole("ddp-mlp");
