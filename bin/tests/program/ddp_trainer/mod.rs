//! Tests of the command `ddp-trainer`: real processes, compared with PyTorch and with repeated runs.

mod input;
mod output;
mod pytorch;
mod resume;

const TRAINER: crate::common::Girandole = crate::common::Girandole("ddp-trainer");
