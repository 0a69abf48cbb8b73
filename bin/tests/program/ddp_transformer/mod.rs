//! Tests of the command `ddp-transformer`: real processes, compared with PyTorch and with repeated runs.

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

const TRANSFORMER: crate::common::Girandole = crate::common::Girandole("ddp-transformer");
