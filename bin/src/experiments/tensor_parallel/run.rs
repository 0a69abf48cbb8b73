//! Training on a mesh.

use std::path::Path;

use candle_core::Tensor;
use candle_nn::Optimizer;
use comm::{Mesh, peak_rss_bytes, reset_peak_rss};
use report::RunSeries;
use report::metrics::Held;
use serde::{Deserialize, Serialize};
use tensor_parallel::{Result as LayerResult, ShardBuilder, TensorParallel, TensorParallelConfig, Weights};
use training::{Adam, AdamConfig, OptimizerState, activation_bytes};

use crate::error::Result;
use crate::held::{bytes, gradient_bytes};
use crate::options::{CheckpointOptions, keeps_losses};
use crate::rank::{Measured, Rank};
use crate::run_log::{LogConfig, RunLog};
use crate::trainer::RunIdentity;
use crate::trainer::parts::Keeping;

use super::OnMesh;
use super::batches::Batches;
use super::figures::Figures;
use super::keeping::{self, Position};
use super::mesh::mesh;

/// Steps that data parallelism is measured over, after one that is not.
const COMPARED_STEPS: usize = 4;

/// A model and its data.
pub(super) trait Task {
    /// The model.
    type Model;

    /// Makes the model.
    fn model(&self, builder: ShardBuilder) -> LayerResult<Self::Model>;

    /// The loss of the samples at these places, in training.
    fn loss(&self, model: &TensorParallel<Self::Model>, samples: &[usize]) -> Result<Tensor>;

    /// Samples that there are.
    fn samples(&self) -> usize;

    /// Whether a run can go on in this epoch with so many samples left of it, of all ranks together.
    fn check_left(&self, _epoch: usize, _samples: usize) -> Result<()> {
        Ok(())
    }

    /// The line that is printed after a step.
    fn line(&self, epoch: usize, batch: usize, loss: f32) -> String;
}

/// How to train.
#[derive(Debug, Clone)]
pub(super) struct RunConfig<'a> {
    pub(super) sizes: (usize, usize),
    pub(super) parallel: TensorParallelConfig,
    pub(super) weights: Weights,
    pub(super) epochs: usize,
    pub(super) batch_size: usize,
    pub(super) lr: f64,
    pub(super) report: bool,
    pub(super) save: Option<&'a Path>,
    pub(super) checkpoints: &'a CheckpointOptions,
    pub(super) run: RunIdentity,
}

impl<'a> RunConfig<'a> {
    /// What an experiment's options say, with its epochs, batch size and learning rate, as one of its ranks.
    pub(super) fn of<E: OnMesh>(
        experiment: &'a E,
        checkpoints: &'a CheckpointOptions,
        weights: Weights,
        (epochs, batch_size, lr): (usize, usize, f64),
        rank: &Rank,
    ) -> Result<Self> {
        let (common, mesh, world_size) = (experiment.common(), experiment.mesh(), rank.comm.world_size());
        Ok(Self {
            sizes: mesh.sizes(world_size)?,
            parallel: TensorParallelConfig {
                sequence_parallel: mesh.sequence_parallel,
                seed: common.seed,
                device: common.device()?,
                ..TensorParallelConfig::default()
            },
            weights,
            epochs,
            batch_size,
            lr,
            report: keeps_losses(common, checkpoints),
            save: common.save.as_deref(),
            checkpoints,
            run: experiment.identity(world_size),
        })
    }
}

/// What rank 0 has in the end.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trained {
    pub(super) series: RunSeries,
    /// Of the mesh that was asked for.
    pub(super) own: Figures,
    /// Of data parallelism on as many ranks.
    pub(super) data_parallel: Figures,
}

/// Trains on the mesh, then measures data parallelism on the same ranks, model and samples a step.
pub(super) fn train<T: Task>(task: &T, config: &RunConfig<'_>, rank: &mut Rank) -> Result<Trained> {
    let (series, own) = trained(task, config, rank)?;
    let data_parallel = data_parallel(task, config, rank)?;
    Ok(Trained { series, own, data_parallel })
}

fn trained<T: Task>(task: &T, config: &RunConfig<'_>, rank: &mut Rank) -> Result<(RunSeries, Figures)> {
    let mesh = mesh(&rank.comm, config.sizes)?;
    let mut job = Job::new(task, config, &mesh, config.batch_size)?;
    let (is_first, steps_per_epoch) = (rank.is_first(), job.batches.len());
    let steps = config.epochs.saturating_mul(steps_per_epoch);
    let mut metrics = rank.metrics.take();
    let log = LogConfig { run: None, keep: config.report, steps, ..LogConfig::default() };
    let mut log = is_first.then(|| RunLog::new(&log, metrics.as_mut()));
    let mut keeping = Keeping::new(config.checkpoints, config.run.clone());
    keeping::resume(&mut keeping, rank, task, &mut job, log.as_mut())?;
    let (watch, begun) = (rank.stopwatch_over(&job.groups), job.at.step);
    let sent = job.parallel.stats().bytes_sent;
    while job.at.epoch < config.epochs {
        job.epoch(task, config.epochs, log.as_mut(), &mut keeping)?;
    }
    let steps = job.at.step - begun;
    let measured = watch.stop();
    let series = log.map(RunLog::finish).unwrap_or_default();
    rank.metrics = metrics;
    let figures = job.figures(sent, steps, &measured)?;
    rank.held = Some(figures.held);
    let seconds = rank.measured(measured, None, (steps, series.seconds))?;
    if let Some(path) = config.save {
        job.parallel.save(path)?;
    }
    let (dp, tp) = config.sizes;
    let world_size = rank.comm.world_size();
    let name = format!("tp {tp}, dp {dp}");
    let series = RunSeries { name, seconds, world_size, steps_per_epoch, ..series };
    Ok((series, figures.largest(&*rank.comm)?))
}

fn data_parallel<T: Task>(task: &T, config: &RunConfig<'_>, rank: &Rank) -> Result<Figures> {
    let world_size = rank.comm.world_size();
    let parallel = TensorParallelConfig { sequence_parallel: false, ..config.parallel.clone() };
    let config = RunConfig { sizes: (world_size, 1), parallel, ..config.clone() };
    let mesh = mesh(&rank.comm, config.sizes)?;
    reset_peak_rss();
    // As many samples a step in all.
    let together = config.batch_size.saturating_mul(config.sizes.0.max(1));
    let batch_size = (together / world_size).max(1);
    let mut job = Job::new(task, &config, &mesh, batch_size)?;
    let samples = job.batches.epoch(0)?;
    let mut samples = samples.iter().cycle();
    if let Some(first) = samples.next() {
        job.step(task, first)?;
    }
    let (watch, sent) = (rank.stopwatch_over(&job.groups), job.parallel.stats().bytes_sent);
    for samples in samples.take(COMPARED_STEPS) {
        job.step(task, samples)?;
    }
    job.figures(sent, COMPARED_STEPS, &watch.stop())?.largest(&*rank.comm)
}

/// A model that is trained.
pub(super) struct Job<T: Task> {
    pub(super) parallel: TensorParallel<T::Model>,
    pub(super) optimizer: Adam,
    pub(super) batches: Batches,
    groups: Vec<std::sync::Arc<dyn comm::Communicator>>,
    pub(super) at: Position,
    /// Of the first step.
    gradients: u64,
    activations: u64,
}

impl<T: Task> Job<T> {
    fn new(task: &T, config: &RunConfig<'_>, mesh: &Mesh, batch_size: usize) -> Result<Self> {
        // Each model draws from the same place.
        let weights = match &config.weights {
            Weights::Random(generator) => {
                Weights::Random(generator.with(|generator| generator.clone()).into())
            }
            other => other.clone(),
        };
        let parallel = TensorParallel::new(mesh, &config.parallel, &weights, |builder| task.model(builder))?;
        let adam = AdamConfig { learning_rate: config.lr, ..AdamConfig::default() };
        let optimizer = Adam::named(parallel.named_vars(), adam)?;
        let batches = Batches::new(mesh, task.samples(), batch_size)?;
        let groups = vec![mesh.axis("tp")?.clone(), mesh.axis("dp")?.clone()];
        Ok(Self {
            parallel,
            optimizer,
            batches,
            groups,
            at: Position::default(),
            gradients: 0,
            activations: 0,
        })
    }

    /// Trains to the end of the epoch that it is in.
    fn epoch(
        &mut self,
        task: &T,
        epochs: usize,
        mut log: Option<&mut RunLog<'_>>,
        keeping: &mut Keeping<'_>,
    ) -> Result<()> {
        let Position { epoch, batch: first, .. } = self.at;
        let batches = self.batches.epoch(epoch)?;
        for (place, samples) in batches.iter().enumerate() {
            let batch = first + place;
            let loss = self.step(task, samples)?;
            self.batches.learnt(samples.len());
            if let Some(log) = log.as_deref_mut() {
                log.step(epoch, batch, loss)?;
                log.say(format_args!("{}", task.line(epoch, batch, loss)))?;
            }
            self.at.batch = batch + 1;
            let ends = place + 1 == batches.len();
            if ends {
                self.next_epoch();
            }
            keeping::keep(keeping, (ends, ends && epoch + 1 == epochs), self, log.as_deref_mut())?;
        }
        if batches.is_empty() {
            self.next_epoch();
        }
        Ok(())
    }

    fn next_epoch(&mut self) {
        (self.at.epoch, self.at.batch) = (self.at.epoch + 1, 0);
        self.batches.begin(self.at.epoch);
    }

    fn step(&mut self, task: &T, samples: &[usize]) -> Result<f32> {
        self.parallel.begin_step(self.at.step as u64);
        self.at.step += 1;
        let loss = tracing::info_span!("forward").in_scope(|| task.loss(&self.parallel, samples))?;
        let is_first = self.gradients == 0;
        if is_first {
            self.activations = activation_bytes(&loss, []) as u64;
        }
        let gradients = self.parallel.backward(&loss)?;
        if is_first {
            self.gradients = gradient_bytes(&self.parallel.vars(), &gradients);
        }
        tracing::info_span!("optimizer").in_scope(|| self.optimizer.step(&gradients))?;
        Ok(loss.to_scalar()?)
    }

    /// What this rank has, after so many steps since it had sent so many bytes.
    fn figures(&self, sent: u64, steps: usize, measured: &Measured) -> Result<Figures> {
        let steps = steps.max(1) as f64;
        let vars = self.parallel.vars();
        let state = self.optimizer.state()?;
        let held = Held {
            weights: bytes(vars.iter().map(|var| var.as_tensor())),
            copies: 0,
            gradients: self.gradients,
            optimizer: bytes(state.iter().map(|(_, tensor)| tensor)),
            activations: self.activations,
            sent: (self.parallel.stats().bytes_sent - sent) as f64 / steps,
        };
        Ok(Figures { held, peak_rss: peak_rss_bytes(), step_s: measured.seconds / steps })
    }
}
