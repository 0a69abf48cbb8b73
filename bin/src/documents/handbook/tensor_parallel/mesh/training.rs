//! Training on a mesh, and the comparison with data parallelism.

use std::sync::Arc;

use candle_core::Tensor;
use cli::error::Result;
use cli::rank::Rank;
use cli::trainer::{Divided, Epochs, Losses, Position, Source, Step, Strategy, Trainer};
use comm::Mesh;
use comm::internal::{peak_rss_bytes, reset_peak_rss};
use report::RunSeries;
use report::metrics::MemoryUse;
use sampler::{DataLoader, DataLoaderConfig, DistributedSampler, DistributedSamplerConfig};
use serde::{Deserialize, Serialize};
use strategy::DistributedModel;
use tensor_parallel::{Result as LayerResult, ShardBuilder, TensorParallel, TensorParallelConfig, Weights};
use training::{Adam, AdamConfig};

use super::OnMesh;
use super::measurements::Measurements;
use super::options::mesh;

/// Measured steps of each of the compared layouts, after one warm-up step.
const COMPARED_STEPS: usize = 4;

/// A model, its data and its loss.
pub trait Task {
    /// The model.
    type Model;

    /// Builds the model.
    ///
    /// # Errors
    /// Those of the builder.
    fn model(&self, builder: ShardBuilder) -> LayerResult<Self::Model>;

    /// Computes the training loss of the samples with these indices.
    ///
    /// # Errors
    /// Those of the model.
    fn loss(&self, model: &TensorParallel<Self::Model>, samples: &[usize]) -> Result<Tensor>;

    /// Returns the number of samples.
    fn samples(&self) -> usize;

    /// Formats the line that is printed after a step.
    fn line(&self, epoch: usize, batch: usize, loss: f32) -> String;
}

/// Configuration of the training.
#[derive(Debug, Clone)]
pub struct TensorParallelRunConfig {
    /// Numbers of data-parallel and of tensor-parallel ranks.
    pub sizes: (usize, usize),
    /// How layers are divided.
    pub parallel: TensorParallelConfig,
    weights: Weights,
    batch_size: usize,
    lr: f64,
}

impl TensorParallelRunConfig {
    /// Creates the configuration of a rank from an experiment's options, batch size and learning rate.
    ///
    /// # Errors
    /// A device that does not exist here; numbers whose product is not the world size.
    pub fn of<E: OnMesh>(
        experiment: &E,
        weights: Weights,
        batch_size: usize,
        lr: f64,
        rank: &Rank,
    ) -> Result<Self> {
        let (common, mesh) = (experiment.common(), experiment.mesh());
        let parallel = TensorParallelConfig {
            sequence_parallel: mesh.sequence_parallel,
            seed: common.seed,
            device: common.device()?,
            ..TensorParallelConfig::default()
        };
        Ok(Self { sizes: mesh.sizes(rank.comm.world_size())?, parallel, weights, batch_size, lr })
    }
}

/// Result of training and comparison.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trained {
    /// Losses of the training.
    pub series: RunSeries,
    /// Figures of the requested mesh.
    pub own: Measurements,
    /// Figures of data parallelism on the same number of ranks.
    pub data_parallel: Measurements,
}

/// Trains on the mesh, then measures data parallelism with the same ranks, model and samples per step.
///
/// # Errors
/// A model that cannot be built, a file that cannot be written, a rank that failed.
pub fn train<E: OnMesh, T: Task>(
    experiment: &E,
    task: &T,
    config: &TensorParallelRunConfig,
    rank: &mut Rank,
) -> Result<Trained> {
    let mesh = mesh(&rank.comm, config.sizes)?;
    let (parallel, optimizer) = build(task, config, &mesh)?;
    let loss = |model: &TensorParallel<T::Model>, samples: &Vec<usize>| task.loss(model, samples);
    let divided = Divided::new(parallel, optimizer, loss, &mesh)?;
    let mut trainer = Trainer::new(divided, epochs(&mesh, task, config)?);
    let mut losses = Losses(|step: &Step<'_>, loss: f32| {
        step.say(format_args!("{}", task.line(step.epoch, step.batch, loss)))
    });
    let ran = trainer.run(rank, &experiment.run_config(rank), &mut losses)?;
    let peak_rss = peak_rss_bytes();
    let mut divided = trainer.into_model();
    if let Some(path) = &experiment.common().save {
        divided.parallel().save_full(path)?;
    }
    let (step_s, _) = further_steps(&mut divided, epochs(&mesh, task, config)?, rank)?;
    let own = Measurements { held: ran.held, peak_rss, step_s }.largest(&*rank.comm)?;
    drop(divided);
    Ok(Trained { series: ran.series, own, data_parallel: data_parallel(task, config, rank)? })
}

fn data_parallel<T: Task>(task: &T, config: &TensorParallelRunConfig, rank: &Rank) -> Result<Measurements> {
    let world_size = rank.comm.world_size();
    let parallel = TensorParallelConfig { sequence_parallel: false, ..config.parallel.clone() };
    // The same total number of samples per step.
    let together = config.batch_size.saturating_mul(config.sizes.0.max(1));
    let batch_size = (together / world_size).max(1);
    let config = TensorParallelRunConfig { sizes: (world_size, 1), parallel, batch_size, ..config.clone() };
    let mesh = mesh(&rank.comm, config.sizes)?;
    reset_peak_rss();
    let (parallel, optimizer) = build(task, &config, &mesh)?;
    let loss = |model: &TensorParallel<T::Model>, samples: &Vec<usize>| task.loss(model, samples);
    let mut divided = Divided::new(parallel, optimizer, loss, &mesh)?;
    let (step_s, sent) = further_steps(&mut divided, epochs(&mesh, task, &config)?, rank)?;
    let held = MemoryUse { sent, ..divided.held()? };
    Measurements { held, peak_rss: peak_rss_bytes(), step_s }.largest(&*rank.comm)
}

/// Takes some more steps, after one that does not count. Returns their mean time, and the mean bytes sent.
fn further_steps(
    divided: &mut dyn Strategy<Batch = Vec<usize>>,
    mut epochs: Epochs<Vec<usize>, Vec<usize>>,
    rank: &Rank,
) -> Result<(f64, f64)> {
    let batches: Vec<_> = epochs.batches(Position::default())?.collect::<Result<_>>()?;
    let (mut batches, mut at) = (batches.iter().cycle(), Position::default());
    let mut step = |divided: &mut dyn Strategy<Batch = Vec<usize>>| -> Result<()> {
        if let Some(batch) = batches.next() {
            divided.step(at, batch)?.map(|loss| loss.to_scalar::<f32>()).transpose()?;
            at.step += 1;
        }
        Ok(())
    };
    step(divided)?;
    let (watch, sent) = (rank.stopwatch_over(&divided.groups()), divided.stats().bytes_sent);
    (0..COMPARED_STEPS).try_for_each(|_| step(divided))?;
    let sent = (divided.stats().bytes_sent - sent) as f64 / COMPARED_STEPS as f64;
    Ok((watch.measured().seconds / COMPARED_STEPS as f64, sent))
}

/// Returns the epochs of sample indices for a rank's position along `dp`, in the order of PyTorch's sampler of the
/// same name.
fn epochs<T: Task>(
    mesh: &Mesh,
    task: &T,
    config: &TensorParallelRunConfig,
) -> Result<Epochs<Vec<usize>, Vec<usize>>> {
    let (dp, samples, batch_size) = (mesh.axis("dp")?, task.samples(), config.batch_size);
    let sampler = DistributedSampler::new(DistributedSamplerConfig {
        dataset_len: samples,
        num_replicas: dp.world_size(),
        rank: dp.rank(),
        ..DistributedSamplerConfig::default()
    })?;
    let config = DataLoaderConfig { batch_size, ..DataLoaderConfig::default() };
    let loader = DataLoader::new(Arc::new((0..samples).collect()), sampler, Ok, config)?;
    Ok(Epochs::new(loader).over("{} data-parallel ranks"))
}

/// Builds the model on a mesh, with its optimizer.
fn build<T: Task>(
    task: &T,
    config: &TensorParallelRunConfig,
    mesh: &Mesh,
) -> Result<(TensorParallel<T::Model>, Adam)> {
    // Each model draws from a copy of the generator, so all get the same weights.
    let weights = match &config.weights {
        Weights::Random(generator) => Weights::Random(generator.with(|generator| generator.clone()).into()),
        other => other.clone(),
    };
    let parallel = TensorParallel::new(mesh, &config.parallel, &weights, |builder| task.model(builder))?;
    let adam = AdamConfig { learning_rate: config.lr, ..AdamConfig::default() };
    let optimizer = Adam::named(parallel.named_vars(), adam)?;
    Ok((parallel, optimizer))
}
