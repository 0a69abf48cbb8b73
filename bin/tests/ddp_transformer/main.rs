//! `ddp-transformer` as a user runs it: real processes, compared with PyTorch and with itself.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod dropout;
#[cfg(target_os = "linux")]
mod elastic;
mod input;
mod model;
mod output;
mod precision;
mod pytorch;
#[cfg(target_os = "linux")]
mod resume;

const TRANSFORMER: common::Girandole = common::Girandole("ddp-transformer");
