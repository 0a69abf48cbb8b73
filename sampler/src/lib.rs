//! Samplers and data loading: which sample goes to which rank, PyTorch's random numbers, and a data loader.
//!
//! Read it in this order:
//!
//! - [`DistributedSampler`] divides the indices of a data set among ranks in PyTorch's order, index for index, and
//!   resumes within an epoch from a [`SamplerState`], also with another number of ranks.
//! - [`SequentialSampler`] and [`RandomSampler`] are for one process; [`BatchSampler`] groups the indices of any
//!   [`Sampler`] into batches.
//! - [`RunOrder`] is for runs of many epochs and data sets of a billion rows: batches continue across epochs, and no
//!   whole permutation is stored ([`LazyPermutation`]).
//! - [`DataLoader`] loads batches of samples of a [`Dataset`], on the calling thread or on workers.
//! - [`Generator`] draws PyTorch's CPU random numbers, equal to the bit, and [`initial`] the initial values of
//!   PyTorch's layers.
//!
//! This crate does not depend on tensors or communication: its results are indices, `f32`s and whatever a collate
//! function returns.
//!
//! ```
//! use std::sync::Arc;
//! use sampler::{DataLoader, DataLoaderConfig, DistributedSampler, DistributedSamplerConfig, Sampler};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dataset = Arc::new((0..10).map(|i| i as f32).collect::<Vec<_>>());
//! let config = DistributedSamplerConfig { dataset_len: 10, num_replicas: 2, rank: 0, ..Default::default() };
//! let sampler = DistributedSampler::new(config)?;
//! let loader_config = DataLoaderConfig { batch_size: 2, ..Default::default() };
//! let mut loader = DataLoader::new(dataset, sampler, |items| Ok(items), loader_config)?;
//! for epoch in 0..2 {
//!     loader.set_epoch(epoch);
//!     for batch in loader.batches()? {
//!         let _batch: Vec<f32> = batch?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod allocation;
mod batch;
mod cephes;
mod dataset;
mod distributed;
mod error;
mod fetch;
mod fused;
mod generator;
pub mod initial;
mod lazy;
mod loader;
mod normal;
mod order;
mod permutation;
mod random;
mod run_loader;
mod sequential;
mod split_mix;
mod state;
mod tail;
mod traits;
mod workers;

pub use batch::{BatchIndices, BatchSampler};
pub use dataset::Dataset;
pub use distributed::{DistributedIndices, DistributedSampler, DistributedSamplerConfig};
pub use error::{BoxError, SamplerError};
pub use generator::Generator;
pub use lazy::LazyPermutation;
pub use loader::{Batches, DataLoader, DataLoaderConfig};
pub use order::{OrderConfig, RunOrder};
pub use random::{RandomSampler, SharedGenerator};
pub use run_loader::RunLoader;
pub use sequential::SequentialSampler;
pub use split_mix::split_mix;
pub use state::SamplerState;
pub use tail::Tail;
pub use traits::{Indices, Sampler};
