//! `ddp-linear` as a user runs it: real processes, compared with PyTorch and with itself.
#![allow(clippy::unwrap_used)]

mod command;
mod golden;
mod pytorch;
mod trace;
