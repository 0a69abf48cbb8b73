//! Training components that candle lacks, each usable without the others; the operations are those of [`ops`]:
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{Optimizer, VarMap};
//! use sampler::{Generator, SharedGenerator};
//! use ops::{backward, cross_entropy, linear, rms_norm};
//! use training::{Adam, AdamConfig, TorchInit, clip_grad_norm};
//!
//! // PyTorch's initial weights for this seed.
//! let (vars, random) = (VarMap::new(), SharedGenerator::from(Generator::new(42)));
//! let builder = TorchInit::var_builder(&random, &vars, DType::F32, &Device::Cpu);
//! let (norm, head) = (rms_norm(4, 1e-6, builder.pp("norm"))?, linear(4, 2, builder.pp("head"))?);
//! let mut optimizer = Adam::new(vars.all_vars(), AdamConfig { learning_rate: 0.1, ..AdamConfig::default() })?;
//! let (x, classes) = (Tensor::eye(4, DType::F32, &Device::Cpu)?, Tensor::new(&[0u32, 1, 1, 0], &Device::Cpu)?);
//! let mut losses = Vec::new();
//! for _ in 0..20 {
//!     let loss = cross_entropy(&head.forward(&norm.forward(&x)?)?, &classes, None)?;
//!     losses.push(loss.to_scalar::<f32>()?);
//!     let mut grads = backward(&loss)?;
//!     clip_grad_norm(&mut grads, &vars.all_vars(), 1.0)?;
//!     optimizer.step(&grads)?;
//! }
//! assert!(losses[19] < 0.5 * losses[0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Read it in this order: a model's first weights, then what trains it, then files:
//!
//! - [`TorchInit`] is a variable builder that gives any candle model PyTorch's initial weights, from a seed.
//! - [`Sgd`], with momentum, and [`Adam`] (also AdamW) are [`candle_nn::Optimizer`]s whose state can be saved:
//!   [`OptimizerState`]. [`Muon`] steps the matrices of hidden layers by orthogonal directions, and the rest by AdamW.
//!   [`StepOptimizer`] is what a training loop needs of any of them.
//! - [`LossScaler`] keeps small f16 gradients from underflowing to 0.
//! - [`clip_grad_norm`] clips the gradients of a model that is replicated on every rank.
//! - [`audit`] finds parameters that get no gradient, with the likely reason, and [`check_gradient`] gradients that backward
//!   has lost a part of.
//! - [`build`] lets a model be written once for every parallel layout.
//! - [`Checkpoints`] saves model, optimizer and sampler to disk; a checkpoint is complete or absent even after a
//!   crash. [`TensorFile`] reads and [`save_tensors`] writes a file of tensors.
//! - [`internal`] is what the strategies and commands share.
#![deny(unsafe_code)]

mod adam;
mod audit;
mod backward_owner;
pub mod build;
mod checkpoint;
mod clip;
mod error;
mod file;
mod file_error;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod grad_sums;
mod gradient_check;
mod gradient_report;
mod init;
pub mod internal;
mod loss_scaler;
mod low_bits;
mod missing_gradients;
mod muon;
mod narrow;
mod optimizer;
mod platform;
mod runs;
mod sgd;
mod slot;
mod state;
mod tensor_file;

pub use adam::{Adam, AdamConfig};
pub use audit::{AuditConfig, OnMissingGradient, audit};
#[cfg(any(test, fuzzing))]
pub use checkpoint::fuzz_manifest;
pub use checkpoint::{Checkpoint, CheckpointConfig, Checkpoints, Contents, Draft, FileHash};
pub use clip::{clip_grad_norm, grad_norm};
pub use error::{Error, Fallback, Result};
pub use file::{load_tensors, save_tensors};
pub use file_error::FileError;
#[cfg(any(test, fuzzing))]
pub use fuzz::fuzz_tensor_file;
pub use gradient_check::{GradientCheckConfig, check_gradient};
pub use gradient_report::{GradientCheck, LostGradient};
pub use init::TorchInit;
pub use loss_scaler::{LossScaler, LossScalerConfig, LossScalerState, ScaledModel};
pub use missing_gradients::{GradientAudit, NoGradient};
pub use muon::{AdjustRate, Muon, MuonConfig};
pub use optimizer::{HeldWhole, StepOptimizer, WholeMatrices};
pub use sgd::{Sgd, SgdConfig};
pub use state::{DeferredCopy, OptimizerState, named_vars};
pub use tensor_file::{TensorFile, load_weights, save_weights};
