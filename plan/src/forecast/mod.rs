//! How long a step would take on ranks that are not there: the schedules that the executors run, on paper.
//!
//! [`Network`] says what lies between two ranks, given or fitted to what `comm-bench` measured ([`fit`](fit::fit)). [`Work`] says
//! what a model computes, [`Layout`] how it is spread, and [`predict`] runs a step of it: collectives message by message, by the
//! very schedules of [`comm::algorithm`], pipelines by those of [`pipeline::Schedule`].
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
