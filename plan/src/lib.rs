//! What a layout of distributed training costs before it runs: memory of a rank, bytes sent, and the time of a step on machines
//! that are not there. Nothing is allocated and no rank is started.
//!
//! A [`Model`] is a row of units: what each of them holds, computes, keeps for backward and sends. [`Strategy::all`] lists the
//! ways in which so many ranks can train it, [`Strategy::left_out`] those in which they cannot, with the reason.
//! [`Strategy::estimate`] tells memory by kind and bytes sent, and [`planned`] the time of a step besides, by running the
//! schedules of `comm` and `pipeline` message by message on a network ([`forecast`]).
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
//! Read in this order: [`model`] (sizes), [`strategy`] (memory and bytes of each way), [`collective`] (what an operation sends),
//! [`forecast`] (time), [`step`] (a strategy as work on a network), [`Table`] (all of it as lines or JSON).
#![forbid(unsafe_code)]

pub mod collective;
mod error;
pub mod extent;
pub mod forecast;
mod json;
pub mod language;
pub mod model;
mod optimizer;
pub mod step;
pub mod strategy;
mod table;
pub mod units;

pub use error::{Error, Result};
pub use extent::Extent;
pub use model::{MlpLoss, Model, TransformerSizes};
pub use optimizer::Optimizer;
pub use step::{Hardware, Planned, planned, recommended};
pub use strategy::{Estimate, Memory, Setting, Sharding, Strategy};
pub use table::Table;
