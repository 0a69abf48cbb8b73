//! Fully sharded data-parallel training: every rank keeps a part of each parameter, its gradient and its optimizer state, and
//! has all of a parameter only while the layer that it belongs to runs.
//!
//! A model is made of *units*, layers or groups of layers. The lines that differ from a program for one process are those
//! with `unit` or `fsdp`:
//!
//! ```
//! # use std::sync::Arc;
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_nn::{Linear, Module, Optimizer, linear, loss};
//! use comm::{Communicator, Local};
//! use fsdp::{Fsdp, FsdpConfig, Unit};
//! use sampler::{Generator, SharedGenerator};
//! use training::{Adam, AdamConfig, TorchInit};
//!
//! struct Net {
//!     hidden: Unit<Linear>,
//!     head: Unit<Linear>,
//! }
//!
//! impl Module for Net {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.head.forward(&self.hidden.forward(x)?.relu()?)
//!     }
//! }
//!
//! fn train(comm: Arc<dyn Communicator>) -> Result<f32> {
//!     let x = Tensor::new(&[[comm.rank() as f32], [comm.rank() as f32 + 2.0]], &Device::Cpu)?;
//!     let generator = SharedGenerator::from(Generator::new(42));
//!     let vb = TorchInit::tensor_builder(&generator, DType::F32, &Device::Cpu);
//!     let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), |units| {
//!         Ok(Net {
//!             hidden: units.pp("hidden").unit(|vb| linear(1, 64, vb))?,
//!             head: units.pp("head").unit(|vb| linear(64, 1, vb))?,
//!         })
//!     })?;
//!     let mut optimizer = Adam::named(fsdp.named_vars(), AdamConfig::default())?;
//!     for _ in 0..300 {
//!         let loss = loss::mse(&fsdp.forward(&x)?, &((&x * 2.0)? + 3.0)?)?;
//!         let mut grads = fsdp.backward(&loss)?;
//!         fsdp.clip_grad_norm(&mut grads, 10.0)?;
//!         optimizer.step(&grads)?;
//!     }
//!     fsdp.forward(&Tensor::new(&[[1.5f32]], &Device::Cpu)?)?.flatten_all()?.get(0)?.to_scalar()
//! }
//!
//! // Two ranks as threads; in earnest they are processes.
//! for predicted in Local::run_shared(2, |comm| Ok(train(comm)?))? {
//!     assert!((predicted - 6.0).abs() < 0.3, "{predicted}");
//! }
//! # Ok::<(), fsdp::Error>(())
//! ```
//!
//! # What else there is
//!
//! - [`Strategy`]: keep parameters from forward to backward, or shard nothing; [`UnitConfig`] says it for one unit;
//!   [`Fsdp::hybrid`] shards within one axis of a mesh and has copies along another.
//! - [`MixedPrecision`]: units compute, and gradients are averaged, in f16 or bf16, while shards stay f32;
//!   [`LossScaler`] keeps small gradients of f16 from vanishing.
//! - A batch does not fit into memory: [`Fsdp::backward_no_sync`] for all micro-batches but the last; or operations that compute units
//!   again in backward ([`Unit::run`]).
//! - A model that is written for every layout, on [`training::build`]: `Fsdp::new(comm, vb, &config, |units|
//!   Net::new(&Builder::from(units)))`.
//! - Some weights are frozen: use them detached. A parameter that no rank has used has no gradient, and does not change.
//! - Gradients are to be clipped by their global norm: [`Fsdp::clip_grad_norm`]; where the model is one part of a larger one, by that
//!   one's: [`Fsdp::set_norm_over`].
//! - Are copies of the shards still equal? [`Fsdp::check_parameters`] says which is not, where, and on which rank.
//! - What does it hold? [`Fsdp::memory`] and [`Fsdp::activation_bytes`].
//! - A run is to go on later: [`Fsdp::save_checkpoint`] and [`Fsdp::load_checkpoint`], at any other number of ranks, too;
//!   [`full_tensors`] reads such a checkpoint without ranks.
//! - First values lie in files: with [`UnitBuilder::reading`] each rank reads what it keeps of them, where the builder of
//!   [`Fsdp::new`] is asked for whole parameters.
//! - Weights of another program, and for another program: [`Fsdp::load_full`] reads each rank's part of a safetensors file,
//!   [`Fsdp::save_full`] writes one.
//!
//! # How it works
//!
//! Each unit's parameters are one flat buffer, of which every rank keeps a part, the *shard*: for each parameter a variable of what
//! lies of it there, which any `candle_nn::Optimizer` steps on. What the model computes with are tensors without elements, which get
//! them by an all-gather before their unit runs, and lose them after it. While a unit runs, the next one is gathered. Each unit's
//! output goes through an operation that is the identity; when backward comes to it, the unit is gathered again. The
//! parameters' tensors hang on a variable of one element, so that backward comes to them, too: when all gradients of a unit
//! are there, a reduce-scatter gives every rank its part of the mean. Backward is past a unit when it has gone through all that was
//! computed while the unit ran: then the parameters are released, also those that were used detached.
//!
//! A parameter that somebody keeps and uses outside its unit's run is an error: its storage is exchanged for one of a dtype
//! that candle computes nothing with.
//!
//! A trace shows the spans `unit`, `gather`, `reduce` (communication begins), `backward`, and `wait` for what was not hidden
//! behind computation; the communicator's own are called `collective`.
#![forbid(unsafe_code)]

mod builder;
mod built;
mod clip;
mod config;
mod core;
mod error;
mod groups;
mod hook;
mod layout;
mod memory;
mod model;
mod replicas;
mod sharding;
mod state;
mod storage;
mod unit;
mod units;
mod values;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use builder::UnitBuilder;
pub use config::{FsdpConfig, MixedPrecision, Strategy, UnitConfig};
pub use error::{Error, Result};
pub use memory::{Bytes, Memory};
pub use model::Fsdp;
#[cfg(any(test, fuzzing))]
pub use state::fuzz_tensor_file;
pub use state::{TensorFile, full_tensors};
pub use training::{LossScaler, LossScalerConfig, LossScalerState};
pub use unit::{Outputs, Unit};

/// Locks; a panic elsewhere while it was locked makes the Fsdp fail by other means.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
