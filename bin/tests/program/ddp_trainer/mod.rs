//! `ddp-trainer` as a user runs it: real processes, compared with PyTorch and with itself.

mod input;
mod output;
mod pytorch;
mod resume;

const TRAINER: crate::common::Girandole = crate::common::Girandole("ddp-trainer");
