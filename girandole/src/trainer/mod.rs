//! The training loop: batches in the sampler's order, a learning rate schedule, gradient clipping, evaluation,
//! checkpoints, and resuming from one in any layout.
//!
//! ```
//! use std::sync::Arc;
//! use candle_core::{Device, Result, Tensor};
//! use girandole::comm::{Communicator, Local};
//! use girandole::models::{CausalLm, ModelConfig, Weights};
//! use girandole::trainer::{Data, NoObserver, TrainConfig, Trainer};
//! use girandole::{Batch, Layout, Parallel, ParallelConfig};
//!
//! /// Rows of tokens, each of which tells the next.
//! struct Counting;
//!
//! impl Data for Counting {
//!     fn rows(&self) -> usize {
//!         64
//!     }
//!
//!     fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
//!         let tokens = |first: u32| rows.iter().flat_map(move |row| (0..8).map(move |i| (*row as u32 + i + first) % 32));
//!         let tensor = |first| Tensor::from_iter(tokens(first), device)?.reshape((rows.len(), 8));
//!         Ok((tensor(0)?, tensor(1)?.to_dtype(candle_core::DType::I64)?).into())
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
//!     let mut trainer = Trainer::new(&mut model, Arc::new(Counting), train)?;
//!     Ok(trainer.run(&mut NoObserver)?.last_loss)
//! })?;
//! assert!(trained[0] < 1.0 && trained[0] == trained[1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checkpoints;
mod config;
mod consistency;
mod data;
mod elastic;
mod evaluate;
mod first_gradients;
mod learning_rate;
mod observer;
mod optimizer;
mod origin;
mod preferences;
mod rounds;
mod saver;
mod step;
mod stop;

use std::sync::Arc;
use std::time::Instant;

use comm::Operation;
use training::build::Model;

use self::checkpoints::RunCheckpoints;
use self::consistency::check_equal_on_all_ranks;
use self::data::Batches;
use self::elastic::{Job, RankState};
use self::optimizer::RunOptimizer;
use crate::far::Notice;
use crate::parallel::FarGroups;
use crate::{Parallel, Result};

pub use crate::far::checkpoints::{FarRun, latest as latest_of_groups};
pub use checkpoints::claim_checkpoints;
pub use config::{CheckpointPlan, Replacement, TrainConfig};
pub use consistency::{ChangedSetting, CheckpointExtra, check_resume, observer_state};
pub use data::Data;
pub use elastic::{Joining, size_with_new_ranks, wait_for_new_ranks};
pub use evaluate::{evaluate, pair_log_probs};
pub use learning_rate::{Decay, LearningRate};
pub use observer::{NoObserver, Observer, ObserverState, Regrouping, StepReport};
pub use optimizer::OptimizerConfig;
pub use preferences::{PreferenceData, Reference};
pub use stop::{Stop, StopCheck, StopFlag};

/// A model, its data, and the state of its training.
pub struct Trainer<'a, M> {
    config: TrainConfig,
    model: &'a mut Parallel<M>,
    optimizer: RunOptimizer,
    batches: Batches,
    evaluation: Option<&'a dyn Data>,
    done: Done,
    checkpoints: RunCheckpoints,
    job: Job,
    /// Asks whether the run is to stop early.
    stop: Option<StopCheck>,
    /// Summary of the current run so far.
    summary: Summary,
}

/// How far a run is.
#[derive(Debug, Default)]
struct Done {
    /// Number of completed steps.
    step: usize,
    /// With `far`: step of the last average, and in an elastic run what ranks have told each other in it.
    averaged: usize,
    notice: Notice,
    /// Step of the last evaluation.
    evaluated: usize,
    /// Number of final tasks, the work after the last step, that are done.
    final_tasks: usize,
    /// Report of the last step.
    latest: Option<StepReport>,
}

/// Summary of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Summary {
    /// Number of steps of this run.
    pub steps: usize,
    /// Loss of the last step; NaN if there was none.
    pub last_loss: f64,
    /// Number of targets that counted.
    pub targets: usize,
    /// Time of the training loop in seconds, without the work after the last step.
    pub seconds: f64,
    /// Time of the steps alone, without evaluations and checkpoints.
    pub step_seconds: f64,
    /// Number of checkpoints that were begun.
    pub checkpoints: usize,
    /// Time that training was blocked by checkpoints, except for the wait at the end.
    pub checkpoint_seconds: f64,
    /// Time of the wait at the end for a checkpoint that was still being written.
    pub last_checkpoint_seconds: f64,
}

/// Work of all ranks after the last step. After the loss of a rank it may be repeated, also on ranks that had completed
/// it.
pub type FinalTask<'a, M> = &'a mut dyn FnMut(&mut Parallel<M>) -> Result<()>;

impl<'a, M: Model> Trainer<'a, M> {
    /// Creates a trainer at step 0. Call on every rank.
    ///
    /// # Errors
    /// A configuration that is not valid, or not the same on all ranks; a checkpoint folder that cannot be created, or that
    /// another run uses; failures of communication.
    pub fn new(model: &'a mut Parallel<M>, data: Arc<dyn Data>, config: TrainConfig) -> Result<Self> {
        let begins = model.whole_layout();
        config.check_replacement(&begins, model.world().world_size())?;
        config.check_elastic(&begins)?;
        config.check_far(&begins)?;
        let mut trainer = Self::at_beginning(model, data, config)?;
        check_equal_on_all_ranks(trainer.model, &*trainer.batches.data, &trainer.config)?;
        let world = trainer.model.mesh().world().clone();
        let folder = trainer.open_checkpoints()?;
        folder.map_or(Ok(()), |folder| claim_checkpoints(&*world, folder))?;
        trainer.begin_from(None)?;
        trainer.start_writer()?;
        trainer.start_stop_check();
        Ok(trainer)
    }

    /// Creates the trainer of a rank that joins a running job ([`TrainConfig::replacement`]), with a model of
    /// [`Parallel::joining`]: [`run`](Self::run) first receives the state of model, optimizer, data and observer from the
    /// other ranks. Not collective.
    ///
    /// # Errors
    /// A configuration that is not valid; a checkpoint folder that cannot be created.
    pub fn joining(
        model: &'a mut Parallel<M>,
        data: Arc<dyn Data>,
        config: TrainConfig,
        joining: Joining,
    ) -> Result<Self> {
        let mut trainer = Self::at_beginning(model, data, config)?;
        trainer.open_checkpoints()?.map_or(Ok(()), training::Checkpoints::share_claim)?;
        trainer.job.whole = joining.whole()?;
        trainer.job.state = RankState::Joining(joining);
        Ok(trainer)
    }

    fn at_beginning(model: &'a mut Parallel<M>, data: Arc<dyn Data>, config: TrainConfig) -> Result<Self> {
        config.check(model.whole_layout().data_ranks(), model.config().micro_batches)?;
        let batches = Batches::new(data, &config)?;
        let optimizer = RunOptimizer::new(model, &config.optimizer, &config.far)?;
        let job = Job::new(model.world().clone(), config.whole(&model.whole_layout()));
        Ok(Self {
            config,
            model,
            optimizer,
            batches,
            evaluation: None,
            done: Done::default(),
            checkpoints: RunCheckpoints::default(),
            job,
            stop: None,
            summary: Summary::default(),
        })
    }

    /// Sets the evaluation data, used every [`TrainConfig::evaluate_every`] steps and at the end.
    #[must_use]
    pub fn evaluating(mut self, data: &'a dyn Data) -> Self {
        self.evaluation = Some(data);
        self
    }

    /// Returns the number of completed steps.
    pub fn step(&self) -> usize {
        self.done.step
    }

    /// Returns the epoch of the next row.
    pub fn epoch(&self) -> u64 {
        self.batches.epoch()
    }

    /// Returns the model.
    pub fn model(&mut self) -> &mut Parallel<M> {
        self.model
    }

    /// Trains until the last step.
    ///
    /// # Errors
    /// A gradient that is not finite; a loss that is not finite in two steps in a row; evaluation rows without targets;
    /// errors of the model, the data and the observer; a checkpoint that cannot be written; failures of communication;
    /// [`Error::Stopped`](crate::Error::Stopped) if [`TrainConfig::stop`] asked for it.
    pub fn run(&mut self, observer: &mut dyn Observer<M>) -> Result<Summary> {
        self.run_and(observer, &mut [])
    }

    /// Like [`run`](Self::run), with further work of all ranks after the last step, such as saving the model. If a rank
    /// is lost during it, and the run can continue without it ([`TrainConfig::fewest_ranks`]), the others repeat all of
    /// that work. In such a run no rank returns before all have completed everything; if
    /// a rank is lost in that last exchange, some may have returned and others not ([`Observer::regrouping`]).
    ///
    /// # Errors
    /// Those of [`run`](Self::run); errors of the work.
    pub fn run_and(
        &mut self,
        observer: &mut dyn Observer<M>,
        final_tasks: &mut [FinalTask<'_, M>],
    ) -> Result<Summary> {
        self.run_on(self.config.steps, observer, final_tasks)
    }

    /// Trains until `last_step`, which may be before the configured last step; the learning rate schedule is still that
    /// of all steps.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn run_until(&mut self, last_step: usize, observer: &mut dyn Observer<M>) -> Result<Summary> {
        self.run_on(last_step, observer, &mut [])
    }

    fn run_on(
        &mut self,
        last_step: usize,
        observer: &mut dyn Observer<M>,
        final_tasks: &mut [FinalTask<'_, M>],
    ) -> Result<Summary> {
        self.summary = Summary { last_loss: f64::NAN, ..Summary::default() };
        self.done.final_tasks = 0;
        if !self.join(observer)? {
            return Ok(self.summary);
        }
        let (began, first) = (Instant::now(), self.done.step);
        let mut last = began;
        let last_step = last_step.min(self.config.steps);
        loop {
            match self.advance(last_step, final_tasks, observer, &mut last) {
                Ok(true) if self.done.final_tasks == 0 => {
                    self.summary.seconds = began.elapsed().as_secs_f64()
                }
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    if !self.recover(error, observer)? {
                        break;
                    }
                }
            }
        }
        self.summary.steps = self.done.step - first;
        Ok(self.summary)
    }

    /// Does the next thing that is due: an evaluation, a checkpoint (copied while the following step is computed), a
    /// step, and finally the work after the last step. Returns false if nothing is left.
    fn advance(
        &mut self,
        last_step: usize,
        final_tasks: &mut [FinalTask<'_, M>],
        observer: &mut dyn Observer<M>,
        last: &mut Instant,
    ) -> Result<bool> {
        if self.is_round_due() {
            // One in which a rank was lost.
            self.average_groups(observer)?;
        } else if self.is_due(Some(self.config.evaluate_every.unwrap_or(usize::MAX)), self.done.evaluated) {
            // In any case at the end. Before the checkpoint, so that it includes the observer's result.
            tracing::info_span!("evaluation").in_scope(|| self.evaluate(observer))?;
            self.done.evaluated = self.done.step;
        } else if self.is_checkpoint_due() && self.may_save()? {
            self.write_checkpoint(observer)?;
        } else if self.done.step < last_step {
            self.stop_if_asked(observer)?;
            if !self.admit_new_ranks(observer)? {
                self.losses_of_groups().map_or(Ok(()), |losses| losses.check())?;
                let mut report = self.train_step()?;
                let averaged = self.average_after(&mut report, observer);
                report.seconds += last.elapsed().as_secs_f64();
                self.count(report);
                observer.stepped(&report)?;
                averaged?;
                match self.model.expert_loads() {
                    [] => {}
                    loads => observer.routed(report.step, loads)?,
                }
            }
        } else if let Some(task) = final_tasks.get_mut(self.done.final_tasks) {
            // Runs before the wait for the last checkpoint, whose error would prevent it; but it may change variables.
            self.wait_for_copies();
            let far = self.model.far().cloned();
            FarGroups::while_others_work(far.as_ref(), || task(self.model))?;
            self.done.final_tasks += 1;
        } else {
            let stood_still = Instant::now();
            let far = self.model.far().cloned();
            FarGroups::while_others_work(far.as_ref(), || self.finish(observer))?;
            self.summary.last_checkpoint_seconds += stood_still.elapsed().as_secs_f64();
            if self.config.fewest_ranks.is_some() {
                // A rank that is done stays until all are, to repeat the work if another one is lost in it.
                self.model.world().run(Operation::Barrier)?;
            }
            return Ok(false);
        }
        *last = Instant::now();
        Ok(true)
    }

    /// Whether groups are left out that are lost.
    fn has_elastic_groups(&self) -> bool {
        self.model.far().is_some() && self.config.fewest_ranks.is_some()
    }

    /// Whether the step is one after which all groups have averaged.
    fn is_after_average(&self) -> bool {
        self.done.averaged == self.done.step
    }

    /// Counts a completed step.
    fn count(&mut self, report: StepReport) {
        self.done.latest = Some(report);
        self.summary.last_loss = report.loss;
        self.summary.targets += report.targets;
        self.summary.step_seconds += report.seconds;
    }

    /// Whether the current step is a multiple of `every` or the last one, and the work is not done yet.
    fn is_due(&self, every: Option<usize>, done: usize) -> bool {
        let due = |every| self.done.step.is_multiple_of(every) || self.done.step == self.config.steps;
        done < self.done.step && every.is_some_and(due)
    }
}

impl<M> std::fmt::Debug for Trainer<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("step", &self.done.step)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
