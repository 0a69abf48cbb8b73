//! Tests of the command `pipeline-transformer`: real processes, compared with PyTorch and with repeated runs.

#[cfg(target_os = "linux")]
mod faults;
mod input;
mod output;
mod pytorch;
#[cfg(target_os = "linux")]
mod resume;
mod schedules;

const PIPELINE: crate::common::Girandole = crate::common::Girandole("pipeline-transformer");
