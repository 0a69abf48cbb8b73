//! Code shared by the benchmarks and the scaling report: starting ranks as processes, and the training workloads they
//! run.
//!
//! A measuring program starts itself again: as a rank, which [`serve`] runs, or as Girandole's command line.
#![forbid(unsafe_code)]

mod clock;
mod filter;
mod job;
pub mod scaling;
mod split;
pub mod workload;

pub use filter::filter;
pub use job::{Job, Ranks, serve};
pub use split::TimeSplit;
