//! Code shared by the benchmarks and the scaling report: starting ranks as processes, and the training workloads they
//! run.
//!
//! A measuring program starts itself again: as a rank, which [`serve`] runs, or as Girandole's command line.
//!
//! ```no_run
//! use benches::{Job, Ranks, serve};
//!
//! // In a process that was started as a rank, this is all that `main` does.
//! if let Some(code) = serve() {
//!     std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS));
//! }
//! let all_reduces = Job::Operation { name: "all_reduce".into(), bytes: 1 << 20, rounds: 100 };
//! let seconds: f64 = Ranks::new(2).run(&all_reduces)?;
//! # Ok::<(), cli::error::Error>(())
//! ```
//!
//! Read it in this order: [`Job`], [`Ranks`], [`workload`], [`scaling`].
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
