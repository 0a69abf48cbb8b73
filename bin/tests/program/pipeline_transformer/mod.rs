//! `pipeline-transformer` as a user runs it: real processes, compared with PyTorch and with itself.

#[cfg(target_os = "linux")]
mod faults;
mod input;
mod output;
mod pytorch;
#[cfg(target_os = "linux")]
mod resume;
mod schedules;

const PIPELINE: crate::common::Girandole = crate::common::Girandole("pipeline-transformer");
