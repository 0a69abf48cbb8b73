//! Pipeline parallelism: a model split into stages, which process micro-batches.
//!
//! [`Modules`] lists the model's modules, [`Split`] splits the list, and [`Pipeline`] builds a rank's stages and trains them.
//!
//! A schedule is data: for each rank a list of [`Action`]s. [`Schedule`] verifies that a [`Table`] terminates and respects
//! all data dependencies, counts live activations, and can be printed:
//!
//! ```
//! use pipeline::{Schedule, ScheduleKind};
//!
//! let schedule = Schedule::of(ScheduleKind::OneFOneB, 2, 1, 3)?;
//! assert_eq!(schedule.to_string(), "\
//! time   0  1  2  3  4  5  6  7  8  9  10 11
//! rank 0 F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
//! rank 1 .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
//! bubble: 25.0 % of the time; activations alive, by rank: 2 1
//! ");
//! # Ok::<(), pipeline::Error>(())
//! ```
#![forbid(unsafe_code)]

mod agreement;
mod average;
mod checkpoint;
mod clip;
mod config;
mod error;
mod executor;
mod failure_reports;
mod gather;
mod groups;
mod links;
mod modules;
mod pipeline;
mod replicas;
mod schedule;
mod shapes;
mod split;
mod stage;
mod tied;
mod units;
mod utilization;
mod visit;

pub use config::PipelineConfig;
pub use error::{Error, Result};
pub use gather::gather;
pub use modules::Modules;
pub use pipeline::{Pipeline, Step};
pub use schedule::{Action, ActionKind, Durations, Plan, Schedule, ScheduleKind, Span, Table};
pub use split::{Cost, Split};
pub use utilization::Utilization;
