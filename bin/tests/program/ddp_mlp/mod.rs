//! `ddp-mlp` as a user runs it: real processes, compared with PyTorch and with itself.

mod files;
mod pytorch;

const MLP: crate::common::Girandole = crate::common::Girandole("ddp-mlp");
