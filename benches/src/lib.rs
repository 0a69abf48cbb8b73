//! What the benches and the scaling report share: ranks as real processes, and the training that they do.
//!
//! A program that measures starts itself again: as a rank, which [`serve`] runs, or as the command line of Girandole.
#![forbid(unsafe_code)]

mod clock;
mod filter;
mod job;
pub mod scaling;
mod split;
pub mod workload;

pub use filter::filter;
pub use job::{Job, Ranks, serve};
pub use split::Split;
