//! `ddp-mlp` as a user runs it: real processes, compared with PyTorch and with itself.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod files;
mod pytorch;

const MLP: common::Girandole = common::Girandole("ddp-mlp");
