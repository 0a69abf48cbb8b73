//! A training loop that can be taken over: the Trainer tutorial's `Trainer`.

mod checkpoint;
mod elastic;
mod keeper;
mod newcomer;
mod observer;
pub(crate) mod parts;
mod random;
mod run;
mod share;

use candle_core::Tensor;
use candle_nn::{Optimizer, VarMap};
use ddp::Ddp;
use report::metrics::Held;
use sampler::{DataLoader, Dataset, DistributedSampler, SamplerState};
use training::{OptimizerState, activation_bytes, named_vars};

use self::elastic::Door;
use crate::console;
use crate::error::Result;
use crate::held::{bytes, gradient_bytes};
use crate::run_log::RunLog;

pub use keeper::{Keeper, RunEnd, RunIdentity};
pub(crate) use newcomer::begin_anew;
pub use observer::{Epoch, Observer, Step};
pub use random::StepRandom;
pub use run::RunConfig;
pub(crate) use run::{agree, agree_on_command, find};

/// Batches of a rank's part of a data set.
pub type Loader<D, B> = DataLoader<D, B, DistributedSampler>;

/// How a [`Trainer`] goes through epochs.
#[derive(Debug, Clone)]
pub struct TrainerConfig {
    /// Whether each epoch has an order of its own (`set_epoch`). Without, all are in the order of the first. Default: true.
    pub reshuffle: bool,
    /// What steps draw random numbers from, dropout for one. Default: none.
    pub random: Option<StepRandom>,
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self { reshuffle: true, random: None }
    }
}

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

/// Trains a data-parallel model, epoch after epoch: model, batches, optimizer and loss in one place, as in the Trainer tutorial.
///
/// `loss` computes the loss of the model (`&M`) on a batch (`&B`). Every rank makes the same trainer and calls the same methods.
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
/// use bin::trainer::{Trainer, TrainerConfig};
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
/// let mut trainer = Trainer::new(ddp, loader, optimizer, loss, TrainerConfig::default());
/// trainer.train(200, None, &mut ())?;
/// assert!((trainer.ddp().vars()[0].to_vec2::<f32>()?[0][0] - 2.0).abs() < 0.01);
/// # Ok::<(), bin::error::Error>(())
/// ```
pub struct Trainer<M, D: Dataset, B, O, L> {
    ddp: Ddp<M>,
    loader: Loader<D, B>,
    optimizer: O,
    loss: L,
    config: TrainerConfig,
    at: Position,
    keeper: Option<Keeper>,
    /// Of the first step: its activations, and its gradients.
    first: Option<(u64, u64)>,
    /// Bytes sent in steps.
    sent: u64,
    /// Samples that this rank has taken since the epoch began or was resumed, in steps that were done.
    taken: usize,
    /// Batches of the epoch in all, as this rank counts them.
    steps: usize,
    /// The loss of the last step that was begun, and where that was, in a run whose ranks may be lost.
    latest: Option<(Position, Tensor)>,
    /// Steps that have been told of for certain, whoever told.
    told: usize,
    /// Where those come that want to take part, where they may.
    door: Option<Door>,
}

impl<M, D, B, O, L> Trainer<M, D, B, O, L>
where
    D: Dataset + 'static,
    B: Send + 'static,
    O: Optimizer + OptimizerState,
    L: Fn(&M, &B) -> candle_core::Result<Tensor>,
{
    /// A trainer at the beginning of its run.
    pub fn new(ddp: Ddp<M>, loader: Loader<D, B>, optimizer: O, loss: L, config: TrainerConfig) -> Self {
        Self {
            ddp,
            loader,
            optimizer,
            loss,
            config,
            at: Position::default(),
            keeper: None,
            first: None,
            sent: 0,
            taken: 0,
            steps: 0,
            latest: None,
            told: 0,
            door: None,
        }
    }

    /// The model on all ranks.
    pub fn ddp(&self) -> &Ddp<M> {
        &self.ddp
    }

    /// What is to come next.
    pub fn position(&self) -> Position {
        self.at
    }

    /// Batches of this epoch that are still to come, on this rank.
    pub fn remaining(&self) -> usize {
        self.loader.len()
    }

    /// Writes checkpoints from now on. For one rank alone, as all have the same to write; buffers that differ by rank (running
    /// statistics) become this rank's after a resume.
    pub fn keep_checkpoints(&mut self, keeper: Keeper) {
        self.keeper = Some(keeper);
    }

    /// One step: forward, backward with gradients averaged over ranks, and the optimizer's step. Gives the loss of this rank's
    /// batch.
    ///
    /// # Errors
    /// What the loss fails with; a rank that failed.
    pub fn run_batch(&mut self, batch: &B) -> Result<Tensor> {
        if let Some(random) = &self.config.random {
            random.begin(self.loader.sampler().config().rank, self.at.step);
        }
        let loss = tracing::info_span!("forward")
            .in_scope(|| Ok::<_, ddp::Error>((self.loss)(self.ddp.model()?, batch)));
        let loss = loss??;
        let activations = match self.first {
            Some((activations, _)) => activations,
            None => {
                let copies = self.ddp.parameters().iter().map(|parameter| parameter.tensor());
                activation_bytes(&loss, copies) as u64
            }
        };
        if self.door.is_some() {
            self.latest = Some((self.at, loss.detach()));
        }
        let sent = self.ddp.stats().bytes_sent;
        let grads = self.ddp.backward(&loss)?;
        self.sent += self.ddp.stats().bytes_sent - sent;
        if self.first.is_none() {
            self.first = Some((activations, gradient_bytes(&self.ddp.vars(), &grads)));
        }
        tracing::info_span!("optimizer").in_scope(|| self.optimizer.step(&grads))?;
        Ok(loss)
    }

    /// What this rank holds and has sent, after so many steps; `vars` are all of the model, buffers too.
    fn held(&self, steps: usize, vars: &VarMap) -> Result<Held> {
        let parameters = self.ddp.parameters();
        let (activations, gradients) = self.first.unwrap_or_default();
        Ok(Held {
            weights: bytes(named_vars(vars).iter().map(|(_, var)| var.as_tensor())),
            copies: bytes(parameters.iter().map(|parameter| parameter.tensor())),
            gradients,
            optimizer: bytes(self.optimizer.state()?.iter().map(|(_, tensor)| tensor)),
            activations,
            sent: self.sent as f64 / steps.max(1) as f64,
        })
    }

    /// One epoch, or what is left of it where a checkpoint was taken in its middle.
    ///
    /// # Errors
    /// A batch that cannot be loaded; those of [`run_batch`](Self::run_batch), the observer, the log and checkpoints.
    pub fn run_epoch(
        &mut self,
        epoch: usize,
        mut log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.begin_epoch(epoch)?;
        let mut batches = self.loader.batches()?;
        let (batch_size, steps) = (self.batch_size(), self.at.batch + self.remaining());
        self.steps = steps;
        let at = |batch| (epoch, batch, batch_size, steps);
        observer.epoch_begins(&Epoch::new(at(self.at.batch), &saying(log.as_deref())))?;
        while let (false, Some(batch)) = (self.somebody_waits()?, batches.next()) {
            let loss = self.run_batch(&batch?)?;
            self.tell(&loss, log.as_deref_mut(), observer)?;
            self.at.batch += 1;
            self.at.step += 1;
            self.taken = batches.samples();
            // What is due at the end of the epoch waits for the end.
            if self.at.batch < steps && self.keeper.as_ref().is_some_and(|keeper| keeper.is_due(self.at.step))
            {
                self.save(batches.samples(), log.as_deref_mut(), observer)?;
            }
        }
        if self.is_paused() {
            return Ok(());
        }
        self.end_epoch(batch_size, log, observer)
    }

    /// All batches of this epoch were taken: the next one is to come.
    fn end_epoch(
        &mut self,
        batch_size: usize,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Position { epoch, step, .. } = self.at;
        let at = (epoch, self.steps, batch_size, self.steps);
        observer.epoch_ends(&Epoch::new(at, &saying(log.as_deref())))?;
        self.at = Position { epoch: epoch + 1, batch: 0, step };
        self.taken = 0;
        match self.keeper.as_ref().is_some_and(|keeper| keeper.is_due_after_epoch(self.at.step)) {
            true => self.save(0, log, observer),
            false => Ok(()),
        }
    }

    /// All epochs that are left of so many in all, and a last checkpoint.
    ///
    /// # Errors
    /// Those of [`run_epoch`](Self::run_epoch).
    pub fn train(
        &mut self,
        epochs: usize,
        mut log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        while self.at.epoch < epochs && !self.is_paused() {
            self.run_epoch(self.at.epoch, log.as_deref_mut(), observer)?;
        }
        let is_over = self.at.epoch >= epochs;
        match self.keeper.as_ref().is_some_and(|keeper| is_over && !keeper.is_kept(self.at.step)) {
            true => self.save(0, log, observer),
            false => Ok(()),
        }
    }

    /// Puts the sampler at the epoch's start, unless it stands in the middle of this very epoch.
    fn begin_epoch(&mut self, epoch: usize) -> Result<()> {
        if self.at.epoch != epoch {
            self.at = Position { epoch, batch: 0, step: self.at.step };
        }
        if self.at.batch == 0 {
            let state = self.sampler_state(0);
            self.loader.sampler_mut().resume(&state)?;
        }
        self.taken = 0;
        Ok(())
    }

    /// Where the data stand, this rank having taken so many samples since the epoch began or was resumed.
    fn sampler_state(&self, taken: usize) -> SamplerState {
        let state = self.loader.sampler().state(taken);
        match self.at.batch {
            0 => {
                let epoch = if self.config.reshuffle { self.at.epoch as u64 } else { 0 };
                SamplerState { epoch, consumed: 0, ..state }
            }
            _ => state,
        }
    }

    /// Samples in the next batch of this rank.
    fn batch_size(&self) -> usize {
        self.loader.config().batch_size.min(sampler::Sampler::len(self.loader.sampler()))
    }

    fn tell(
        &self,
        loss: &Tensor,
        mut log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Position { epoch, batch, .. } = self.at;
        let mut value = None;
        if let Some(log) = log.as_deref_mut() {
            let loss = loss.to_scalar::<f32>()?;
            log.step(epoch, batch, loss)?;
            value = Some(loss);
        }
        observer.stepped(&Step { epoch, batch, tensor: loss, value, say: &saying(log.as_deref()) })
    }
}

/// How lines are printed: with the bar out of the way, where there is one.
fn saying<'a>(log: Option<&'a RunLog<'_>>) -> impl Fn(std::fmt::Arguments<'_>) -> Result<()> + 'a {
    move |line| match log {
        Some(log) => log.say(line),
        None => console::say(line),
    }
}
