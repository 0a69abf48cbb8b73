//! Fully sharded data-parallel training (FSDP): every rank keeps a shard of each parameter, its gradient and its optimizer
//! state, and holds a whole parameter only while the layer that it belongs to runs.
//!
//! A model consists of *units*: layers or groups of layers. The lines that differ from a single-process program are those
//! with `unit` or `fsdp`:
//!
//! ```
//! # use std::sync::Arc;
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_nn::{Linear, Module, Optimizer, linear, loss};
//! use comm::{Communicator, Local};
//! use fsdp::{DistributedModel, Fsdp, FsdpConfig, Unit};
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
//! Read it in this order: [`Fsdp::new`] and [`UnitBuilder::unit`], [`Fsdp::backward`], [`FsdpConfig`], then what you need of the
//! following.
//!
//! # Further features
//!
//! - [`ShardingStrategy`]: keep parameters from forward to backward, or shard nothing; [`UnitConfig`] sets it for one unit;
//!   [`Fsdp::hybrid`] shards along one axis of a mesh and replicates along another.
//! - [`MixedPrecision`]: units compute, and gradients are averaged, in f16 or bf16, while shards stay f32; [`LossScaler`]
//!   keeps small f16 gradients from underflowing.
//! - Batches that do not fit into memory: [`Fsdp::backward_no_sync`] for all micro-batches but the last; or activation
//!   checkpointing, by operations that run units again in backward ([`Unit::run`]).
//! - Models written for every layout, with [`training::build`]: `Fsdp::new(comm, vb, &config, |units|
//!   Net::new(&Builder::from(units)))`.
//! - Frozen weights: use them detached. A parameter that no rank has used has no gradient, and does not change.
//! - Gradient clipping by global norm: [`DistributedModel::clip_grad_norm`]; if the model is a part of a larger one, by the norm of the
//!   larger one: [`Fsdp::set_norm_over`].
//! - Checking that replicas of the shards are equal: [`Fsdp::check_parameters`] reports the parameter, element and rank that
//!   differ.
//! - Memory accounting: [`Fsdp::memory`] and [`Fsdp::activation_bytes`].
//! - Checkpoint and resume: [`DistributedModel::save_checkpoint`] and [`DistributedModel::load_checkpoint`], also at a different
//!   number of ranks or with another strategy; [`strategy::checkpoint::CheckpointReader`] reads such a checkpoint without ranks.
//! - Initial values from files: with [`UnitBuilder::reading`] each rank reads only what it keeps, whereas the builder given
//!   to [`Fsdp::new`] is asked for whole parameters.
//! - Exchanging weights with other programs: [`DistributedModel::load_full`] reads each rank's shard from a safetensors file,
//!   [`DistributedModel::save_full`] writes one.
//!
//! # How it works
//!
//! The parameters of each unit form one flat buffer, of which every rank keeps a part, the *shard*. The range of each
//! parameter in the shard is a variable, which any `candle_nn::Optimizer` can update. The model computes with tensors that
//! have no elements: an all-gather fills them before their unit runs, and they are released after it. While a unit runs, the
//! next one is gathered. Each unit's output passes through an identity operation; when backward reaches it, the unit is
//! gathered again. The parameters' tensors are computed from a one-element variable, so that backward reaches them, too: when
//! all gradients of a unit have arrived, a reduce-scatter gives every rank its shard of the mean. When backward has passed
//! everything that was computed while the unit ran, its parameters are released, including those used detached.
//!
//! Using a parameter outside its unit's run is an error: the storage of a released parameter has a dtype that no candle
//! operation supports.
//!
//! Tracing spans: `unit`, `gather`, `reduce` (start of communication), `backward`, and `wait` for communication that
//! computation did not hide; those of the communicator are called `collective`.
#![forbid(unsafe_code)]

mod builder;
mod built;
mod bytes;
mod clip;
mod config;
mod core;
mod error;
mod groups;
mod hook;
mod layout;
mod memory;
mod model;
mod pieces;
mod replicas;
mod sharding;
mod storage;
mod unit;
mod units;
mod values;

use training::internal::lock;

pub use builder::UnitBuilder;
pub use config::{FsdpConfig, MixedPrecision, ShardingStrategy, UnitConfig};
pub use error::{Error, Result};
pub use memory::{Bytes, Memory};
pub use model::Fsdp;
pub use strategy::DistributedModel;
pub use training::{LossScaler, LossScalerConfig, LossScalerState};
pub use unit::{Outputs, Unit};
