//! Distributed data-parallel training (DDP): every rank has a replica of the model and a part of the batch, and gradients are
//! averaged while backward computes them.
//!
//! Works with any model that is built with a `VarBuilder` and any `candle_nn::Optimizer`. The lines that differ from a
//! single-process program are those with `Ddp` or `ddp`:
//!
//! ```
//! # use std::sync::Arc;
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
//! use comm::{Communicator, Local};
//! use ddp::{Ddp, DdpConfig};
//!
//! fn train(comm: Arc<dyn Communicator>) -> Result<Vec<f32>> {
//!     let rank = comm.rank() as f32;
//!     let variables = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
//!     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
//!     let mut optimizer = SGD::new(ddp.vars(), 0.05)?;
//!     let x = Tensor::new(&[[rank], [rank + 2.0]], &Device::Cpu)?;
//!     let y = ((&x * 2.0)? + 3.0)?;
//!     for _ in 0..200 {
//!         let loss = loss::mse(&ddp.forward(&x)?, &y)?;
//!         let grads = ddp.backward(&loss)?;
//!         optimizer.step(&grads)?;
//!     }
//!     ddp.forward(&Tensor::new(&[[10f32]], &Device::Cpu)?)?.flatten_all()?.to_vec1()
//! }
//!
//! // Two ranks as threads; in earnest they are processes.
//! for predicted in Local::run_shared(2, |comm| Ok(train(comm)?))? {
//!     assert!((predicted[0] - 23.0).abs() < 0.5);
//! }
//! # Ok::<(), ddp::Error>(())
//! ```
//!
//! Read it in this order: [`Ddp::new`], [`Ddp::backward`], [`DdpConfig`], then what you need of the following.
//!
//! # Further features
//!
//! - Unequal batch sizes: [`Ddp::backward_weighted`] takes the number of samples or tokens, and returns the gradients that a
//!   single process computes on all of them. [`Ddp::backward`] returns the mean of the ranks' means, as PyTorch does, which
//!   then differs.
//! - Unequal numbers of batches: a rank without further batches calls [`Ddp::join`] until all ranks have finished.
//! - Batches that do not fit into memory: [`Ddp::backward_no_sync`] or [`Ddp::backward_weighted_no_sync`] for all
//!   micro-batches but the last. They communicate nothing.
//! - Gradient clipping by global norm: [`DistributedModel::clip_grad_norm`] on the result of backward. The norm is the same on every rank,
//!   without communication.
//! - Slow networks: [`CommHook`] halves the bytes, sends low-rank factors ([`PowerSgdConfig`]), or is user-defined.
//! - Checkpoints with the optimizer's state: [`DistributedModel::save_checkpoint`], [`DistributedModel::load_checkpoint`].
//! - Running statistics: rank 0's are copied to all ranks after each step ([`DdpConfig::broadcast_buffers`]).
//! - Checking that the parameters are equal: [`Ddp::check_parameters`] reports the parameter, element and rank that differ.
//! - Tuning the bucket size: [`DdpConfig::tune_bucket_bytes`] tries several.
//!
//! A training loop that uses all of these:
//!
//! ```
//! # use std::sync::Arc;
//! # use candle_core::{DType, Device, Result, Tensor};
//! # use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear, loss};
//! # use comm::{Communicator, Local};
//! # use ddp::{CommHook, Ddp, DdpConfig, DistributedModel};
//! fn train(comm: Arc<dyn Communicator>, batches: &[Vec<Tensor>]) -> Result<()> {
//!     let vars = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//!     let config = DdpConfig { hook: CommHook::Bf16, ..DdpConfig::default() };
//!     let ddp = Ddp::new(comm, vb, &config, |vb| linear(1, 1, vb))?;
//!     let mut optimizer = SGD::new(ddp.vars(), 0.05)?;
//!     for micro_batches in batches {
//!         let Some((last, others)) = micro_batches.split_last() else { continue };
//!         let loss = |x: &Tensor| ddp.forward(x)?.sqr()?.mean_all();
//!         for x in others {
//!             ddp.backward_weighted_no_sync(&loss(x)?, x.dim(0)? as f64)?;
//!         }
//!         let mut grads = ddp.backward_weighted(&loss(last)?, last.dim(0)? as f64)?;
//!         ddp.clip_grad_norm(&mut grads, 1.0)?;
//!         optimizer.step(&grads)?;
//!     }
//!     while let Some(mut grads) = ddp.join()? {
//!         ddp.clip_grad_norm(&mut grads, 1.0)?;
//!         optimizer.step(&grads)?;
//!     }
//!     ddp.check_parameters()?;
//!     Ok(())
//! }
//!
//! Local::run_shared(2, |comm| {
//!     let micro_batch = |len: usize| Tensor::ones((len, 1), DType::F32, &Device::Cpu);
//!     let all = [vec![micro_batch(2)?, micro_batch(1)?], vec![micro_batch(3)?], vec![micro_batch(4)?]];
//!     let steps = 1 + 2 * comm.rank();
//!     Ok(train(comm, &all[..steps])?)
//! })?;
//! # Ok::<(), ddp::Error>(())
//! ```
//!
//! # How it works
//!
//! [`Ddp::new`] builds the model with a `VarBuilder` that wraps the given one. The model gets a copy of each parameter, made
//! by an operation that is the identity in forward. During backward candle calls that operation as soon as the gradient of
//! its output is complete, last layer first; it copies the gradient into a *bucket*, a flat tensor for several parameters.
//! When a bucket is full and the preceding ones have been started, its all-reduce starts on the communicator's thread, while
//! backward continues with earlier layers. Buckets are initially filled in reverse order of construction, and after the first
//! step in the order in which gradients arrived on rank 0.
//!
//! Tracing spans: `backward`, within it `bucket` for each bucket whose communication starts, and `wait` for communication
//! that backward did not hide; those of the communicator are called `collective`.
//!
//! A layer that computes `weight.matmul(input)`, weight first, gets its gradient after those of the layers before it:
//! candle's backward visits the last argument first. Write `input.matmul(weight)`, as `candle_nn` does.
#![forbid(unsafe_code)]

mod bucket_plan;
mod buckets;
mod builder;
mod check_gradient;
mod comm_hook;
mod config;
mod error;
mod group_setup;
mod hook;
mod initial;
mod model;
mod parameter;
mod pieces;
mod reducer;
mod search;
mod weights;

use training::internal::lock;

pub use comm_hook::{BucketHook, CommHook, GradBucket, GradSlot, PowerSgdConfig, Reduction};
pub use config::DdpConfig;
pub use error::{Error, Result};
pub use model::Ddp;
pub use parameter::Parameter;
pub use strategy::DistributedModel;
