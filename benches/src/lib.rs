//! What the benches share: ranks as real processes.
//!
//! A bench program starts itself again: as a rank, which [`serve`] runs, or as the command line of Girandole.
#![forbid(unsafe_code)]

mod job;

pub use job::{Job, measure, serve};
