//! `ddp-linear` as a user runs it: real processes, compared with PyTorch and with itself.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod environment;
mod files;
mod golden;
mod input;
mod output;
mod pytorch;
mod trace;

#[cfg(target_os = "linux")]
mod faults;
#[cfg(target_os = "linux")]
mod job;
#[cfg(target_os = "linux")]
mod terminal;

const LINEAR: common::Girandole = common::Girandole("ddp-linear");
