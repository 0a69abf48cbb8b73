//! Pipeline parallelism: a model split into stages, which process micro-batches.
//!
//! [`Modules`] lists the model's modules, [`Split`] splits the list, and [`Pipeline`] builds a rank's stages and trains them. Read
//! them in this order, then [`PipelineConfig`] and, below, [`Schedule`]:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Activation, Optimizer, SGD, VarMap, linear, loss};
//! use comm::Local;
//! use pipeline::{Modules, Pipeline, PipelineConfig, Split};
//! use sampler::{Generator, SharedGenerator};
//! use training::TorchInit;
//!
//! let losses = Local::run_shared(2, |comm| {
//!     let modules = Modules::new()
//!         .module("fc1", |vb| linear(1, 8, vb))
//!         .module("relu", |_| Ok(Activation::Relu))
//!         .module("fc2", |vb| linear(8, 1, vb));
//!     let random = SharedGenerator::from(Generator::new(42)); // every rank draws the whole model's weights
//!     let builder = |map: &VarMap| TorchInit::var_builder(&random, map, DType::F32, &Device::Cpu);
//!     let micro_batch = Tensor::zeros((2, 1), DType::F32, &Device::Cpu)?;
//!     let config = PipelineConfig { micro_batches: 2, split: Split::at(["fc2"]), ..PipelineConfig::default() };
//!     let mut pipeline = Pipeline::new(comm, &modules, &builder, &micro_batch, loss::mse, &config)?;
//!     let mut optimizer = SGD::new(pipeline.vars(), 0.02)?;
//!     let x = Tensor::new(&[[0f32], [1.0], [2.0], [3.0]], &Device::Cpu)?;
//!     let (y, mut last) = ((&x * 2.0)?, None);
//!     for _ in 0..100 {
//!         // The first stage's rank needs the batch, the last stage's the target and has the loss.
//!         let step = pipeline.step(Some(&x), Some(&y))?;
//!         optimizer.step(&step.grads)?;
//!         last = step.loss;
//!     }
//!     Ok(last)
//! })?;
//! assert!(losses[0].is_none() && losses[1].is_some_and(|loss| loss < 0.5));
//! # Ok::<(), pipeline::Error>(())
//! ```
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

mod average;
mod compare;
mod config;
mod error;
mod executor;
mod failure_reports;
mod first_audit;
mod groups;
mod links;
mod modules;
mod pieces;
mod pipeline;
mod replicas;
mod same_arguments;
mod schedule;
mod shapes;
mod split;
mod stage;
mod tied;

pub use config::PipelineConfig;
pub use error::{Error, Result};
pub use modules::Modules;
pub use pipeline::{Pipeline, StepOutput};
pub use schedule::{Action, ActionKind, Durations, Plan, Schedule, ScheduleKind, Span, Table};
pub use split::{Cost, Split};
pub use strategy::{DistributedModel, ParameterGroups};
