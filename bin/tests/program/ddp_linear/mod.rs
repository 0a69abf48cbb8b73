//! Tests of the command `ddp-linear`: real processes, compared with PyTorch and with repeated runs.

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

const LINEAR: crate::common::Girandole = crate::common::Girandole("ddp-linear");
