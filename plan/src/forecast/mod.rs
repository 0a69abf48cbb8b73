//! Forecast of the time of a training step on hardware that is not available, by simulating the schedules that the
//! executors run.
//!
//! [`Network`] describes the links between ranks, given or fitted to measurements of `comm-bench` ([`fit`](fit::fit)).
//! [`Work`] describes what a model computes, [`Layout`] how it is distributed, and [`predict`] simulates a step:
//! collectives message by message, with the schedules of [`comm::algorithm`], pipelines with those of
//! [`pipeline::Schedule`].
//!
//! ```
//! use plan::forecast::{Layout, Network, Work, Transformer, predict};
//!
//! let model = Transformer { vocab_size: 50_304, d_model: 2048, d_ff: 8192, num_layers: 24, length: 2048 };
//! let work = Work::transformer(&model, 4, 400e12);
//! let alone = predict(&work, &Layout::ddp(1), &Network::nvlink())?;
//! let many = predict(&work, &Layout::ddp(1024), &Network::ethernet_25g())?;
//! assert!(many.step_s > 5.0 * alone.step_s);
//! # Ok::<(), pipeline::Error>(())
//! ```

mod collective;
mod event;
pub mod fit;
mod layout;
mod network;
mod step;
mod work;

pub use collective::{Collective, Collectives, Group};
pub use layout::{Layout, Sharding};
pub use network::{Link, Network};
pub use step::{Prediction, predict, predict_with};
pub use work::{Layer, Transformer, Work};
