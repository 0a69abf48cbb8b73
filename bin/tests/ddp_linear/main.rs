//! `ddp-linear` as a user runs it: real processes, compared with PyTorch and with itself.
#![allow(clippy::unwrap_used)]

mod command;
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
