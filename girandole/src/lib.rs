//! Distributed training for candle: one model in any layout.
//!
//! To read the code, begin with one training step from top to bottom: `src/trainer/step.rs` ([below](#reading-it)).
//!
//! A model is written once, as a chain of units ([`training::build`]), and a [`Layout`] determines how it is
//! distributed over ranks: copies (`dp`), shards (`shard`, FSDP), divided layers (`tp`), pipeline stages (`pp`), rows divided by
//! position (`cp`), divided experts (`ep`) and groups that average rarely (`far`), in any combination. [`Parallel`] is the model in its layout.
//!
//! ```
//! use std::sync::Arc;
//!
//! use candle_core::{DType, Device, Module, Result, Tensor};
//! use candle_nn::{Optimizer, loss};
//! use girandole::comm::{Communicator, Local};
//! use girandole::training::build::{Builder, Division, Linear, LinearConfig, Model, Unit, Units};
//! use girandole::training::{Adam, AdamConfig};
//! use girandole::{DistributedModel, InitialWeights, Layout, Parallel, ParallelConfig};
//!
//! struct Net([Unit<Linear>; 2]);
//!
//! impl Net {
//!     fn new(b: &Builder) -> Result<Self> {
//!         let up = LinearConfig::new(4, 8, Division::Outputs);
//!         let down = LinearConfig::new(8, 1, Division::Inputs);
//!         Ok(Self([b.unit("up", |p| p.pp("up").linear(&up))?, b.unit("down", |p| p.pp("down").linear(&down))?]))
//!     }
//! }
//!
//! impl Units for Net {
//!     fn units(&self) -> Vec<&dyn Module> {
//!         self.0.iter().map(|unit| unit as &dyn Module).collect()
//!     }
//! }
//!
//! impl Model for Net {
//!     fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
//!         loss::mse(output, targets)
//!     }
//! }
//!
//! fn train(comm: Arc<dyn Communicator>, layout: &Layout) -> girandole::Result<Vec<f64>> {
//!     let mut model = Parallel::new(comm, layout, InitialWeights::seed(42), &ParallelConfig::default(), Net::new)?;
//!     let mut optimizer = Adam::named(model.named_vars(), AdamConfig { learning_rate: 0.1, ..AdamConfig::default() })?;
//!     let (x, y) = (Tensor::ones((2, 4), DType::F32, &Device::Cpu)?, Tensor::ones((2, 1), DType::F32, &Device::Cpu)?);
//!     let mut losses = Vec::new();
//!     for _ in 0..20 {
//!         let mut step = model.step(&x, &y)?; // this rank's rows
//!         model.clip_grad_norm(&mut step.grads, 1.0)?;
//!         optimizer.step(&step.grads)?;
//!         losses.push(step.loss);
//!     }
//!     Ok(losses)
//! }
//!
//! let layout: Layout = "shard=2,tp=2".parse()?;
//! let losses = Local::run_shared(layout.ranks(), |comm| Ok(train(comm, &layout)?))?;
//! assert!(losses[0] == losses[3] && losses[0][19] < 0.1 * losses[0][0]);
//! # Ok::<(), girandole::Error>(())
//! ```
//!
//! # Reading it
//!
//! Begin with `src/trainer/step.rs`: one training step from top to bottom, from the rows of a batch to the report, in one file.
//! All other files are what that one names. Then [`training::build`], how a model is written; [`Layout`]; [`Parallel`], a model in
//! its layout; [`trainer`], the loop around the steps; [`checkpoint`], the format of checkpoints.
//!
//! The crates that a training program needs are re-exported under their names, so that it has only one dependency.
#![forbid(unsafe_code)]

mod agreement;
mod batch;
mod error;
mod far;
mod folder;
mod layout;
mod mesh;
pub mod parallel;
pub mod settings;
pub mod trainer;

pub use {
    comm, context_parallel, ddp, expert_parallel, fsdp, launch, models, ops, pipeline, report, sampler,
    strategy, tensor_parallel, training,
};

pub use batch::Batch;
pub use error::{Error, Result};
pub use far::{FarAverage, FarConfig, FarPrecision};
pub use layout::Layout;
pub use parallel::{
    Evaluation, ExpertBalance, ExpertLoad, FarGroups, IsTrained, Parallel, ParallelConfig, PreferenceReport,
    StagesForward, Step,
};
pub use strategy::{DistributedModel, checkpoint};
pub use tensor_parallel::Weights as InitialWeights;
pub use training::build::Recompute;
