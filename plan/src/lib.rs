//! Estimates what a layout of distributed training costs before it runs: memory per rank, bytes sent, and the time of a
//! step on hardware that is not available. Only [`measure`] allocates and communicates: it measures the hardware there is.
//!
//! A [`Model`] is a sequence of units with their sizes: what each holds, computes, keeps for backward and sends.
//! [`Strategy::estimate`] returns memory by kind and bytes sent, and [`planned`] also the time of a step, for each strategy
//! that a number of ranks can train it with, by simulating the schedules of `comm` and `pipeline` message by message on a
//! network ([`forecast`]). [`Table`] shows them, and recommends one. [`language`] does the same for language models in any
//! layout.
//!
//! ```
//! use plan::forecast::Network;
//! use plan::{Hardware, MlpLoss, Model, Setting, planned};
//!
//! let model = Model::mlp("mlp", &[1024, 4096, 4096, 1024, 10], true, MlpLoss::Classes);
//! let setting = Setting { ranks: 8, batch_size: 256, micro_batches: 4, element: 4, gathered: 2, optimizer: 2 };
//! let hardware = Hardware { network: Network::nvlink(), flops: 300e12, memory_bandwidth: 3e12 };
//! for planned in planned(&model, &setting, &hardware)? {
//!     println!("{}: {} s a step", planned.estimate.strategy.name(8), planned.seconds);
//! }
//! # Ok::<(), plan::Error>(())
//! ```
//!
//! Read in this order: `model` (sizes), `strategy` (memory and bytes of each strategy), `collective` (bytes of an
//! operation), [`forecast`] (time), `step` (a strategy as work on a network), `compare` (the ranks, and what is
//! recommended), [`Table`] (the plan as text or JSON).
//! With the feature `command`, the module `command` has the options of `girandole plan`.
#![forbid(unsafe_code)]

mod collective;
#[cfg(feature = "command")]
pub mod command;
mod compare;
mod error;
#[cfg(feature = "command")]
mod extent;
pub mod forecast;
mod hardware;
mod json;
pub mod language;
pub mod measure;
mod model;
mod optimizer;
mod step;
mod strategy;
mod table;
pub mod units;

pub use compare::{Memory, RankMemory, Ranks, RuledOut};
pub use error::{Error, Result};
pub use hardware::Hardware;
pub use model::{MlpLoss, Model, TransformerSizes};
pub use optimizer::Optimizer;
pub use step::{Planned, planned};
pub use strategy::{Estimate, Setting, Sharding, Strategy};
pub use table::Table;
