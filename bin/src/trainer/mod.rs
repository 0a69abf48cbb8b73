//! The training loop of all experiments, which can be taken over: the Trainer tutorial's `Trainer`.

mod checkpoint;
mod data_parallel;
mod elastic;
mod keeper;
mod newcomer;
mod observer;
mod random;
mod run;
mod share;
mod source;
mod strategy;

use candle_core::Tensor;

use self::elastic::Door;
use crate::console;
use crate::error::Result;
use crate::run_log::RunLog;

pub use checkpoint::Saved;
pub(crate) use checkpoint::{agree_on_command, find, first_choice, misfit};
pub use data_parallel::{Alone, DataParallel};
pub use elastic::conclude;
pub use keeper::{Keeper, RunEnd, RunIdentity};
pub(crate) use newcomer::begin_anew;
pub use observer::{Epoch, Losses, Means, Observer, Step};
pub use random::StepRandom;
pub use run::{Find, Ran, RunConfig};
pub(crate) use source::sampler_state;
pub use source::{Epochs, Loader};
pub use strategy::{Batches, Kept, Parts, Sets, Source, Strategy, Whole};

/// Where a run stands: what comes next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: usize,
    /// The batch of that epoch, from 0.
    pub batch: usize,
    /// Steps done since the beginning.
    pub step: usize,
}

/// Trains a model, epoch after epoch: model, optimizer and loss in a [`Strategy`], batches in a [`Source`], as in the Trainer tutorial.
///
/// Every rank makes the same trainer and calls the same methods.
///
/// # Cost
/// A step costs forward, backward and the optimizer's step, and about a microsecond; more where a checkpoint is due.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss};
/// use comm::{Local, LocalConfig};
/// use ddp::{Ddp, DdpConfig};
/// use bin::trainer::{DataParallel, Epochs, RunEnd, Trainer};
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
/// trainer.train(RunEnd::Epochs(200), None, &mut ())?;
/// assert!((trainer.model().ddp().vars()[0].to_vec2::<f32>()?[0][0] - 2.0).abs() < 0.01);
/// # Ok::<(), bin::error::Error>(())
/// ```
pub struct Trainer<S, D> {
    strategy: S,
    source: D,
    at: Position,
    /// Where this run is to stop.
    end: RunEnd,
    keeper: Option<Keeper>,
    /// Samples that this rank has taken since the epoch began or was resumed, in steps that were done.
    taken: usize,
    /// Batches of the epoch in all, as this rank counts them.
    steps: usize,
    /// Steps that have been told of for certain, whoever told.
    told: usize,
    /// Where those come that want to take part, where they may.
    door: Option<Door>,
}

impl<S: Strategy, D: Source<Batch = S::Batch>> Trainer<S, D> {
    /// A trainer at the beginning of its run.
    pub fn new(strategy: S, source: D) -> Self {
        let (at, end) = (Position::default(), RunEnd::Steps(0));
        Self { strategy, source, at, end, keeper: None, taken: 0, steps: 0, told: 0, door: None }
    }

    /// The model on all ranks.
    pub fn model(&self) -> &S {
        &self.strategy
    }

    /// The same, when training is over.
    pub fn into_model(self) -> S {
        self.strategy
    }

    /// What is to come next.
    pub fn position(&self) -> Position {
        self.at
    }

    /// Writes checkpoints from now on: on every rank if each has a part, on one alone if all have the same to write. Buffers that
    /// differ by rank (running statistics) become that rank's after a resume.
    pub fn keep_checkpoints(&mut self, keeper: Keeper) {
        self.keeper = Some(keeper);
    }

    /// The batches that are left of the epoch.
    fn run_epoch(&mut self, mut log: Option<&mut RunLog<'_>>, observer: &mut dyn Observer) -> Result<()> {
        let mut batches = self.source.batches(self.at)?;
        self.taken = 0;
        self.steps = self.at.batch + self.source.remaining(self.at);
        observer.epoch_begins(&self.epoch(&saying(log.as_deref())))?;
        while let (false, Some(next)) = (self.somebody_waits()?, batches.next()) {
            let (batch, taken) = next?;
            let loss = self.strategy.step(self.at, &batch)?;
            self.tell(loss.as_ref(), log.as_deref_mut(), observer)?;
            self.at.batch += 1;
            self.at.step += 1;
            self.taken = taken;
            // What is due at the end of the epoch waits for the end.
            if self.at.batch < self.steps && self.is_due(false) {
                self.save(taken, log.as_deref_mut(), observer)?;
            }
        }
        if self.is_paused() { Ok(()) } else { self.end_epoch(log, observer) }
    }

    /// All batches of this epoch were taken: the next one is to come.
    fn end_epoch(&mut self, log: Option<&mut RunLog<'_>>, observer: &mut dyn Observer) -> Result<()> {
        self.at.batch = self.steps;
        observer.epoch_ends(&self.epoch(&saying(log.as_deref())))?;
        if let RunEnd::Epochs(_) = self.end {
            (self.at.epoch, self.at.batch) = (self.at.epoch + 1, 0);
        }
        self.taken = 0;
        if self.is_due(true) { self.save(0, log, observer) } else { Ok(()) }
    }

    /// All that is left of the run, and a last checkpoint.
    ///
    /// # Errors
    /// A batch that cannot be loaded; those of the model, the observer, the log and checkpoints.
    pub fn train(
        &mut self,
        end: RunEnd,
        mut log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.end = end;
        while !end.is_reached(self.at) && !self.is_paused() {
            self.run_epoch(log.as_deref_mut(), observer)?;
        }
        let is_over = end.is_reached(self.at);
        match self.keeper.as_ref().is_some_and(|keeper| is_over && !keeper.is_kept(self.at.step)) {
            true => self.save(0, log, observer),
            false => Ok(()),
        }
    }

    fn is_due(&self, epoch_ends: bool) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.is_due(self.at.step, epoch_ends))
    }

    fn epoch<'a>(&self, say: observer::Say<'a>) -> Epoch<'a> {
        let Position { epoch, batch, .. } = self.at;
        Epoch { epoch, batch, batch_size: self.source.batch_size(), steps: self.steps, say }
    }

    /// On a rank that knows the loss.
    fn tell(
        &self,
        loss: Option<&Tensor>,
        mut log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let (Some(tensor), Position { epoch, batch, .. }) = (loss, self.at) else { return Ok(()) };
        let mut value = None;
        if let Some(log) = log.as_deref_mut() {
            let loss = tensor.to_scalar::<f32>()?;
            log.step(epoch, batch, loss)?;
            value = Some(loss);
        }
        observer.stepped(&Step { epoch, batch, tensor, value, say: &saying(log.as_deref()) })
    }
}

/// How lines are printed: with the bar out of the way, where there is one.
fn saying<'a>(log: Option<&'a RunLog<'_>>) -> impl Fn(std::fmt::Arguments<'_>) -> Result<()> + 'a {
    move |line| match log {
        Some(log) => log.say(line),
        None => console::say(line),
    }
}
