//! The training loop of all experiments, with observers: the `Trainer` of the Trainer tutorial.

mod checkpoint;
mod data_parallel;
mod divided;
mod logged;
mod newcomer;
mod observer;
mod random;
mod run;
mod schedule;
mod sharded;
mod source;
mod staged;
mod strategy;

use std::path::PathBuf;

use candle_core::Tensor;
use girandole::trainer::{Stop, StopCheck};
use serde::{Deserialize, Serialize};

use self::run::NewcomerCheck;
use crate::console::say;
use crate::error::{Error, Result};

pub(crate) use checkpoint::{checkpoint_mismatch, find};
pub use data_parallel::{DataParallel, SingleProcess};
pub use divided::Divided;
pub use logged::Logged;
pub(crate) use newcomer::restart_before_first_step;
pub use observer::{Epoch, Losses, Means, Observer, Step};
pub use random::StepRandom;
pub use run::{Find, MakePage, RunConfig, RunResult};
pub use schedule::{CheckpointSchedule, RunEnd, RunIdentity};
pub use sharded::Sharded;
pub use source::{Epochs, Loader, sampler_state};
pub use staged::Staged;
pub use strategy::{Batches, Source, Strategy, Whole};

/// Position of a run: the next batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: usize,
    /// The batch of that epoch, from 0.
    pub batch: usize,
    /// Completed steps since the beginning.
    pub step: usize,
}

/// Trains a model over epochs: model, optimizer and loss are in a [`Strategy`], batches in a [`Source`], as in the
/// Trainer tutorial.
///
/// Every rank creates the same trainer and calls the same methods.
///
/// # Cost
/// A step costs forward, backward and the optimizer's step, plus about a microsecond; more if a checkpoint is due.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss};
/// use comm::{Local, LocalConfig};
/// use ddp::{Ddp, DdpConfig};
/// use cli::trainer::{DataParallel, Epochs, RunEnd, Trainer};
/// use sampler::{BoxError, DataLoader, DataLoaderConfig, DistributedSampler, DistributedSamplerConfig};
/// use training::{Sgd, SgdConfig};
///
/// let comm = Arc::new(Local::group(1, &LocalConfig::default())?.remove(0)); // in earnest, Tcp::connect
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let ddp = Ddp::new(comm, builder, &DdpConfig::default(), |builder| linear(1, 1, builder))?;
/// let optimizer = Sgd::named(ddp.named_vars(), SgdConfig { learning_rate: 0.1, ..SgdConfig::default() })?;
///
/// let samples: Arc<Vec<f32>> = Arc::new(vec![0.0, 1.0, 2.0, 3.0]);
/// let sampler = DistributedSampler::new(DistributedSamplerConfig { dataset_len: 4, ..Default::default() })?;
/// let batch = |x: Vec<f32>| -> Result<Tensor, BoxError> { Ok(Tensor::new(x, &Device::Cpu)?.reshape(((), 1))?) };
/// let config = DataLoaderConfig { batch_size: 2, ..Default::default() };
/// let loader = DataLoader::new(samples, sampler, batch, config)?;
///
/// let loss = |model: &Linear, x: &Tensor| loss::mse(&model.forward(x)?, &((x * 2.0)? + 3.0)?);
/// let model = DataParallel::new(ddp, optimizer, loss, &vars);
/// let mut trainer = Trainer::new(model, Epochs::new(loader));
/// trainer.train(RunEnd::Epochs(200), &mut ())?;
/// assert!((trainer.model().ddp().vars()[0].to_vec2::<f32>()?[0][0] - 2.0).abs() < 0.01);
/// # Ok::<(), cli::error::Error>(())
/// ```
pub struct Trainer<S, D> {
    strategy: S,
    source: D,
    at: Position,
    /// Where this run ends.
    end: RunEnd,
    schedule: Option<CheckpointSchedule>,
    /// Total number of batches of the epoch on this rank.
    steps: usize,
    /// Number of steps that have certainly been logged, by this rank or an earlier reporter.
    logged: usize,
    /// Checks for newcomers; `None` if none can join.
    newcomers: Option<NewcomerCheck>,
    /// Asks whether the run is to stop early, and the folder of its checkpoints; `None` if it never does.
    stop: Option<(StopCheck, PathBuf)>,
}

impl<S: Strategy, D: Source<Batch = S::Batch>> Trainer<S, D> {
    /// Creates a trainer at the beginning of its run.
    pub fn new(strategy: S, source: D) -> Self {
        let (at, end) = (Position::default(), RunEnd::Steps(0));
        Self { strategy, source, at, end, schedule: None, steps: 0, logged: 0, newcomers: None, stop: None }
    }

    /// Returns the strategy, which holds the model.
    pub fn model(&self) -> &S {
        &self.strategy
    }

    /// Consumes the trainer and returns the strategy.
    pub fn into_model(self) -> S {
        self.strategy
    }

    /// Enables checkpoints: call it on every rank if each saves a part, else on one rank only. In that case, buffers
    /// that differ between ranks (running statistics) all become those of the writing rank after a resume.
    pub fn keep_checkpoints(&mut self, schedule: CheckpointSchedule) {
        self.schedule = Some(schedule);
    }

    /// Trains on the remaining batches of the epoch.
    fn run_epoch(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let mut batches = self.source.batches(self.at)?;
        self.steps = self.at.batch + self.source.remaining(self.at);
        let Position { epoch, batch, .. } = self.at;
        observer.epoch_begins(&self.epoch(epoch, batch, self.steps))?;
        while let (false, Some(next)) = (self.pauses(observer)?, batches.next()) {
            let loss = self.strategy.step(self.at, &next?)?;
            self.observe_step(loss.as_ref(), observer)?;
            self.at.batch += 1;
            self.at.step += 1;
            // A checkpoint due after the epoch's last step is written by `end_epoch`.
            if self.at.batch < self.steps && self.is_due(false) {
                self.save(observer)?;
            }
        }
        if self.is_paused() { Ok(()) } else { self.end_epoch(observer) }
    }

    /// Returns whether a newcomer waits to be admitted before the next step. Ends the run there if that is asked for.
    fn pauses(&mut self, observer: &mut dyn Observer) -> Result<bool> {
        if self.at.batch < self.steps {
            self.stop_if_asked(observer)?;
        }
        self.is_newcomer_waiting()
    }

    /// Writes a checkpoint and ends the run with [`Error::Stopped`], if that is asked for.
    fn stop_if_asked(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Some((check, dir)) = &mut self.stop else { return Ok(()) };
        let (Some(Stop { signal, leaves }), dir) = (check.decide()?, dir.clone()) else { return Ok(()) };
        let step = self.at.step;
        if step > 0 && self.schedule.as_ref().is_some_and(|schedule| !schedule.is_saved(step)) {
            self.save(observer)?;
        }
        // A launcher may end all ranks when the first one ends: by then all files must be complete.
        self.stop.as_ref().map_or(Ok(()), |(check, _)| check.wait_for_all())?;
        if leaves { Err(Error::Stopped { step, signal, dir }) } else { Ok(()) }
    }

    /// Ends the epoch after its last batch, and moves to the next one.
    fn end_epoch(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let (epoch, steps) = (self.at.epoch, self.steps);
        self.begin_next_epoch();
        self.finish_epoch(epoch, steps, observer)
    }

    /// Moves to the beginning of the next epoch, if the run has epochs.
    fn begin_next_epoch(&mut self) {
        self.at.batch = self.steps;
        if let RunEnd::Epochs(_) = self.end {
            (self.at.epoch, self.at.batch) = (self.at.epoch + 1, 0);
        }
    }

    /// Tells the observer that an epoch of so many batches has ended, and writes a checkpoint if one is due.
    fn finish_epoch(&mut self, epoch: usize, steps: usize, observer: &mut dyn Observer) -> Result<()> {
        observer.epoch_ends(&self.epoch(epoch, steps, steps))?;
        if self.is_due(true) { self.save(observer) } else { Ok(()) }
    }

    /// Trains to the end of the run, and writes a last checkpoint.
    ///
    /// # Errors
    /// A batch that cannot be loaded; errors of the model, the observer and checkpoints.
    pub fn train(&mut self, end: RunEnd, observer: &mut dyn Observer) -> Result<()> {
        self.end = end;
        while !end.is_reached(self.at) && !self.is_paused() {
            self.run_epoch(observer)?;
        }
        let is_over = end.is_reached(self.at);
        match self.schedule.as_ref().is_some_and(|schedule| is_over && !schedule.is_saved(self.at.step)) {
            true => self.save(observer),
            false => Ok(()),
        }
    }

    fn is_due(&self, epoch_ends: bool) -> bool {
        self.schedule.as_ref().is_some_and(|schedule| schedule.is_due(self.at.step, epoch_ends))
    }

    fn epoch(&self, epoch: usize, batch: usize, steps: usize) -> Epoch<'static> {
        Epoch { epoch, batch, batch_size: self.source.batch_size(), steps, say: &say }
    }

    /// Tells the observer of a step, on a rank that has its loss.
    fn observe_step(&self, loss: Option<&Tensor>, observer: &mut dyn Observer) -> Result<()> {
        let Position { epoch, batch, .. } = self.at;
        loss.map_or(Ok(()), |loss| observer.stepped(&Step::new(epoch, batch, loss)))
    }
}
