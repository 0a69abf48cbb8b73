//! The training loop: batches in the sampler's order, a learning rate schedule, gradient clipping, evaluation,
//! checkpoints, and resuming from one in any layout.
//!
//! ```
//! use std::sync::Arc;
//! use candle_core::{Device, Result, Tensor};
//! use girandole::comm::{Communicator, Local};
//! use girandole::models::{CausalLm, ModelConfig, Weights};
//! use girandole::trainer::{Data, NoObserver, TrainConfig, Trainer};
//! use girandole::{Layout, Parallel, ParallelConfig};
//!
//! /// Rows of tokens, each of which tells the next.
//! struct Counting;
//!
//! impl Data for Counting {
//!     fn rows(&self) -> usize {
//!         64
//!     }
//!
//!     fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
//!         let tokens = |first: u32| rows.iter().flat_map(move |row| (0..8).map(move |i| (*row as u32 + i + first) % 32));
//!         let tensor = |first| Tensor::from_iter(tokens(first), device)?.reshape((rows.len(), 8));
//!         Ok((tensor(0)?, tensor(1)?.to_dtype(candle_core::DType::I64)?))
//!     }
//! }
//!
//! # let json = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
//! #     "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
//! #     "initializer_range": 0.1, "tie_word_embeddings": true, "rope_theta": 10000.0}"#;
//! let config = ModelConfig::from_json(json)?;
//! let layout: Layout = "dp=2".parse()?;
//! let trained = Local::run_shared(layout.ranks(), |comm| {
//!     let (weights, config) = (Weights::random(&config, 1).map_err(girandole::comm::carry)?, config.clone());
//!     let build = move |builder: &_| CausalLm::new(&config, builder);
//!     let mut model = Parallel::new(comm, &layout, weights.parts(), &ParallelConfig::default(), build)?;
//!     let train = TrainConfig { steps: 40, batch_size: 8, learning_rate: 0.02, ..TrainConfig::default() };
//!     let mut trainer = Trainer::new(&mut model, &Counting, train)?;
//!     Ok(trainer.run(&mut NoObserver)?.last_loss)
//! })?;
//! assert!(trained[0] < 1.0 && trained[0] == trained[1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod consistency;
mod evaluate;
mod learning_rate;
mod run;
mod saver;
mod stop;
mod tokens;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use comm::Communicator;
use serde::{Deserialize, Serialize};

use crate::{Layout, Parallel};

pub use config::{CheckpointPlan, Replacement, TrainConfig};
pub use consistency::{ChangedSetting, check_resume, observer_state};
pub use evaluate::evaluate;
pub use learning_rate::{Decay, LearningRate};
pub use run::{FinalTask, Joining, Summary, Trainer, claim_checkpoints};
pub use saver::BackgroundSaver;
pub use stop::{Stop, StopCheck, StopFlag};

/// Training data: rows, accessed by index.
pub trait Data: Send + Sync {
    /// Returns the number of rows.
    fn rows(&self) -> usize;

    /// Returns some rows as the model's input and targets.
    ///
    /// # Errors
    /// Rows that cannot be read.
    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)>;

    /// Returns an identification of the data: a run resumes only with the data that its checkpoint was made with. By
    /// default the number of rows.
    fn fingerprint(&self) -> String {
        format!("{} rows", self.rows())
    }
}

/// Report of one training step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the step, from 1, including those before a resume.
    pub step: usize,
    /// The epoch of the step's first row, from 0.
    pub epoch: u64,
    /// Mean loss over all targets.
    pub loss: f64,
    /// Norm of the gradients before clipping; infinite if the step was skipped.
    pub grad_norm: f64,
    /// Factor of the loss in backward: 1 without [`ParallelConfig::loss_scale`](crate::ParallelConfig::loss_scale).
    pub loss_scale: f64,
    /// Whether a gradient was not finite on some rank, so that nothing was changed.
    pub skipped: bool,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// Number of targets that counted.
    pub targets: usize,
    /// Time since the previous step.
    pub seconds: f64,
    /// Time that this rank's groups spent in collectives in this step, including waiting for other ranks; it may
    /// overlap with computation.
    pub communication_seconds: f64,
    /// The part of that time in which another rank had not started the same collective yet
    /// ([`Stats::waited_ns`](comm::Stats::waited_ns)).
    pub waiting_seconds: f64,
}

/// State of an [`Observer`] that is stored in checkpoints.
#[derive(Debug, Clone, Default)]
pub struct ObserverState {
    /// Everything except tensors. Default: null.
    pub values: serde_json::Value,
    /// Tensors on the CPU. Default: none.
    pub tensors: HashMap<String, Tensor>,
}

/// A change of the group of all ranks.
#[derive(Debug)]
pub struct Regrouping<'a> {
    /// The group before; of a rank that has joined a running job, the current one.
    pub before: &'a Arc<dyn Communicator>,
    /// The current group.
    pub world: &'a Arc<dyn Communicator>,
    /// The current layout.
    pub layout: &'a Layout,
    /// The epoch of the next row.
    pub epoch: u64,
    /// The last loss of a rank, if any was lost.
    pub lost: Option<&'a comm::Error>,
}

/// Callbacks during training. All ranks call them in the same order; a rank that reports nothing may ignore them.
pub trait Observer<M> {
    /// Called after each step.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn stepped(&mut self, _report: &StepReport) -> crate::Result<()> {
        Ok(())
    }

    /// Called after an evaluation, with the loss on the evaluation data. May use the model, in the same way on all
    /// ranks.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn evaluated(&mut self, _step: usize, _loss: f64, _model: &mut Parallel<M>) -> crate::Result<()> {
        Ok(())
    }

    /// Returns the state to store in a checkpoint, for a run that resumes from it ([`observer_state`]), or for new ranks
    /// ([`joined`](Self::joined)). Called on one rank only, for checkpoints on rank 0.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn state(&self) -> crate::Result<ObserverState> {
        Ok(ObserverState::default())
    }

    /// Called before a checkpoint of this step is written: the observer should flush its own files, which a run that
    /// resumes from it may need.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn saving(&mut self, _step: usize) -> crate::Result<()> {
        Ok(())
    }

    /// Called after ranks were lost ([`TrainConfig::fewest_ranks`]) or new ones have joined, before anything else, with the
    /// group of all ranks. Returns whether the run goes on: false if one of them has returned from it already
    /// and so tells the others in this method's collectives, as all had then completed everything.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn regrouping(&mut self, _world: &Arc<dyn Communicator>) -> crate::Result<bool> {
        Ok(true)
    }

    /// Called when the ranks continue after a step, in another group; this rank's number may have changed. If the step is
    /// before one that was reported already, the steps after it are repeated.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn regrouped(&mut self, _step: usize, _change: &Regrouping<'_>) -> crate::Result<()> {
        Ok(())
    }

    /// Called in place of [`regrouped`](Self::regrouped) on a rank that has joined a running job, with the
    /// [`state`](Self::state) of another rank's observer.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn joined(&mut self, _step: usize, _state: ObserverState, _change: &Regrouping<'_>) -> crate::Result<()> {
        Ok(())
    }

    /// Called after a checkpoint is written.
    ///
    /// # Errors
    /// Any error; it ends the training.
    fn saved(&mut self, _step: usize, _folder: &Path) -> crate::Result<()> {
        Ok(())
    }
}

/// An observer that does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl<M> Observer<M> for NoObserver {}
