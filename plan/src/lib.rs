//! Estimates what a layout of distributed training costs before it runs: memory per rank, bytes sent, and the time of a
//! step on hardware that is not available. Only [`measure`] allocates and communicates: it measures the hardware there is.
//!
//! A [`Model`] is a sequence of units with their sizes: what each holds, computes, keeps for backward and sends.
//! [`Strategy::all`] lists the strategies that a number of ranks can train it with, [`Strategy::left_out`] those that
//! are not possible, with the reason. [`Strategy::estimate`] returns memory by kind and bytes sent, and [`planned`]
//! also the time of a step, by simulating the schedules of `comm` and `pipeline` message by message on a network
//! ([`forecast`]).
//!
//! ```
//! use plan::forecast::Network;
//! use plan::{Hardware, MlpLoss, Model, Setting, planned, recommended};
//!
//! let model = Model::mlp("mlp", &[1024, 4096, 4096, 1024, 10], true, MlpLoss::Classes);
//! let setting = Setting { ranks: 8, batch_size: 256, micro_batches: 4, element: 4, gathered: 2, optimizer: 2 };
//! let hardware = Hardware { network: Network::nvlink(), flops: 300e12, memory_bandwidth: 3e12 };
//! let all = planned(&model, &setting, &hardware)?;
//! let best = recommended(&all, &setting, 80e9).ok_or("nothing fits")?;
//! println!("{}: {} s a step", best.estimate.strategy.name(8), best.seconds);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Read in this order: [`model`] (sizes), [`strategy`] (memory and bytes of each strategy), [`collective`] (bytes of an
//! operation), [`forecast`] (time), [`step`] (a strategy as work on a network), [`Table`] (the plan as text or JSON).
//! With the feature `command`, the module `command` has the options of `girandole plan`.
#![forbid(unsafe_code)]

pub mod collective;
#[cfg(feature = "command")]
pub mod command;
mod error;
pub mod extent;
pub mod forecast;
mod json;
pub mod language;
pub mod measure;
pub mod model;
mod optimizer;
pub mod step;
pub mod strategy;
mod table;
pub mod units;

pub use error::{Error, Result};
pub use extent::SizeBounds;
pub use model::{MlpLoss, Model, TransformerSizes};
pub use optimizer::Optimizer;
pub use step::{Hardware, Planned, planned, recommended};
pub use strategy::{Estimate, Memory, Setting, Sharding, Strategy};
pub use table::Table;
