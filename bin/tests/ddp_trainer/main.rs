//! `ddp-trainer` as a user runs it: real processes, compared with PyTorch and with itself.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod input;
mod output;
mod pytorch;
mod resume;

const TRAINER: common::Girandole = common::Girandole("ddp-trainer");
