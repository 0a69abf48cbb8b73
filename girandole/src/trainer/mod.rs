//! The one training loop: batches in the sampler's order, a learning rate by schedule, clipping, evaluation, checkpoints, and going on from
//! one in any layout.
//!
//! ```
//! use std::sync::Arc;
//! use candle_core::{Device, Result, Tensor};
//! use girandole::comm::{Communicator, Local};
//! use girandole::models::{CausalLm, ModelConfig, Weights};
//! use girandole::trainer::{Data, Silent, TrainConfig, Trainer};
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
//!     Ok(trainer.run(&mut Silent)?.last_loss)
//! })?;
//! assert!(trained[0] < 1.0 && trained[0] == trained[1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
mod elastic;
mod learning_rate;
mod run;
mod same;
mod saver;
mod tokens;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use comm::Communicator;
use serde::{Deserialize, Serialize};

use crate::Parallel;

pub use config::{CheckpointPlan, TrainConfig};
pub use learning_rate::{Decay, LearningRate};
pub use run::{Ending, Summary, Trainer};
pub use same::{ChangedSetting, check_resume, observer_state};
pub use saver::Saver;

/// What is trained on: rows, by their numbers.
pub trait Data: Send + Sync {
    /// How many there are.
    fn rows(&self) -> usize;

    /// Some of them as the model's input and targets.
    ///
    /// # Errors
    /// Rows that cannot be read.
    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)>;

    /// Tells this data from others: a run goes on only with the data that its checkpoint was made with. By default the number of rows.
    fn fingerprint(&self) -> String {
        format!("{} rows", self.rows())
    }
}

/// What a step came to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// From 1, those before a resume counted.
    pub step: usize,
    /// The epoch of the step's first row, from 0.
    pub epoch: u64,
    /// The mean loss of all targets.
    pub loss: f64,
    /// The gradients' norm before clipping; infinite where the step was skipped.
    pub grad_norm: f64,
    /// What the loss was multiplied with for backward: 1 without [`ParallelConfig::loss_scale`](crate::ParallelConfig::loss_scale).
    pub loss_scale: f64,
    /// Whether a gradient was not finite on some rank, and nothing was changed.
    pub skipped: bool,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// Targets that counted.
    pub targets: usize,
    /// Time since the step before.
    pub seconds: f64,
    /// Time that this rank's groups were inside collectives in this step, waiting for others included; it may overlap with computing.
    pub communication_seconds: f64,
    /// The part of it in which another rank had not begun the same collective yet ([`Stats::waited_ns`](comm::Stats::waited_ns)).
    pub waiting_seconds: f64,
}

/// What a checkpoint keeps of an [`Observer`].
#[derive(Debug, Clone, Default)]
pub struct ObserverState {
    /// What is no tensor. Default: null.
    pub values: serde_json::Value,
    /// Tensors on the CPU. Default: none.
    pub tensors: HashMap<String, Tensor>,
}

/// What a program wants to know while it trains. All ranks call it alike; a rank that prints nothing does nothing.
pub trait Observer<M> {
    /// After each step.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn stepped(&mut self, _report: &StepReport) -> crate::Result<()> {
        Ok(())
    }

    /// After an evaluation, with the loss of the rows that are evaluated; the model may be asked for more on all ranks.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn evaluated(&mut self, _step: usize, _loss: f64, _model: &mut Parallel<M>) -> crate::Result<()> {
        Ok(())
    }

    /// What a checkpoint of now is to keep of it, for a run that goes on from there ([`observer_state`]). Rank 0 is asked.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn state(&self) -> crate::Result<ObserverState> {
        Ok(ObserverState::default())
    }

    /// Before a checkpoint of this step is written: what belongs to it is to be safe.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn saving(&mut self, _step: usize) -> crate::Result<()> {
        Ok(())
    }

    /// After the loss of a rank, before anything else, in the group of those that are left ([`TrainConfig::fewest_ranks`]).
    ///
    /// # Errors
    /// Whatever ends the training.
    fn lost(&mut self, _left: &Arc<dyn Communicator>) -> crate::Result<()> {
        Ok(())
    }

    /// When those that are left of `before` ranks go on after a step; the rank may have another number.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn regrouped(
        &mut self,
        _step: usize,
        _before: usize,
        _lost: &comm::Error,
        _left: &Arc<dyn Communicator>,
    ) -> crate::Result<()> {
        Ok(())
    }

    /// After a checkpoint is there.
    ///
    /// # Errors
    /// Whatever ends the training.
    fn saved(&mut self, _step: usize, _folder: &Path) -> crate::Result<()> {
        Ok(())
    }
}

/// An observer that does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl<M> Observer<M> for Silent {}
