//! `pipeline-transformer` as a user runs it: real processes, compared with PyTorch and with itself.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod faults;
mod input;
mod output;
mod pytorch;
#[cfg(target_os = "linux")]
mod resume;
mod schedules;

const PIPELINE: common::Girandole = common::Girandole("pipeline-transformer");
