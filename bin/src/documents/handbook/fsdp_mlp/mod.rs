//! `fsdp-mlp`, the sharded (FSDP) example of the PyTorch handbook.

mod data;
pub mod model;
mod options;
pub mod peak_memory;

use cli::prelude::*;
use cli::trainer::Sharded;
use ops::cross_entropy;
use training::build::Builder;
use training::{Adam, AdamConfig, TensorFile, TorchInit};

use candle_core::{DType, Tensor};
use candle_nn::Module;
use comm::{Mesh, all_gather_object};
use fsdp::{Fsdp, LossScaler, LossScalerConfig};
use sampler::{Generator, SharedGenerator};
use serde::{Deserialize, Serialize};

pub use options::{FloatKind, FsdpMlpOptions, Sharding};

use data::{Batches, Samples};

use self::model::LargeModel;
use self::peak_memory::PeakMemory;
use crate::documents::shared::python::Fixed;
use strategy::DistributedModel;

/// The handbook prints the loss of every so many steps.
const PRINTED: usize = 10;

/// Result of training.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trained {
    series: RunSeries,
    /// Peak memory, indexed by rank.
    held: Vec<PeakMemory>,
    /// Line about the final loss scale and skipped steps; `None` without loss scaling.
    scaling: Option<String>,
}

/// What each process creates at the start: no model, since no process holds it whole.
pub struct Setup {
    samples: Option<Samples>,
}

impl Command for FsdpMlpOptions {
    const NAME: &'static str = "fsdp-mlp";
    const WORLD_SIZE: usize = 4;
    const JOINT: &'static [&'static str] = &["save"];
    type Setup = Setup;
    type Trained = Trained;

    options_of!(common, checkpoints);

    fn settings(&self, _: usize) -> Vec<(String, String)> {
        let param_dtype = format!("{:?}", self.param_dtype);
        let reduce_dtype = format!("{:?}", self.reduce_dtype.unwrap_or(self.param_dtype));
        let loss_scale = self.loss_scale.map_or("none".into(), |scale| scale.to_string());
        let dtypes = settings!(self, param_dtype = param_dtype, reduce_dtype = reduce_dtype);
        [settings!(self, lr, batch_size, features, hidden, loss_scale = loss_scale), dtypes].concat()
    }

    fn check(&self, world_size: usize) -> Result<()> {
        self.check_sizes(world_size)
    }

    fn setup(&self) -> Result<Setup> {
        if let Some(path) = &self.common.init {
            let (file, wanted) = (TensorFile::open(path)?, self.model().parameters());
            wanted.iter().try_for_each(|(name, dims)| file.check(name, dims, DType::F32))?;
            file.only_of_model(&wanted.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>())?;
        }
        let read = |path| Samples::read(&TensorFile::open(path)?, self.features);
        Ok(Setup { samples: self.common.data.as_deref().map(read).transpose()? })
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let fsdp = self.build(rank)?;
        if let Some(path) = &self.common.init {
            fsdp.load_full(path)?;
        }
        let batches = Batches::new(self, setup.samples, rank)?;
        let config = AdamConfig { learning_rate: self.lr, ..AdamConfig::default() };
        let optimizer = Adam::named(fsdp.named_vars(), config)?;
        let scaler = |scale| LossScaler::new(LossScalerConfig { scale, ..LossScalerConfig::default() });
        let scaler = self.loss_scale.map(scaler).transpose()?;
        let mut trainer = Trainer::new(Sharded::new(fsdp, optimizer, scaler, loss), batches);
        let mut losses = Losses(|step: &Step<'_>, loss: f32| match step.batch.is_multiple_of(PRINTED) {
            true => step.say(format_args!("Step {}, Loss: {}", step.batch, Fixed::<4>(loss.into()))),
            false => Ok(()),
        });
        let series = trainer.run(rank, &self.run_config(rank), &mut losses)?.series;
        let trainee = trainer.model();
        let held = all_gather_object(&*rank.comm, &PeakMemory::of(trainee))?;
        if let Some(path) = &self.common.save {
            trainee.fsdp().save_full(path)?;
        }
        Ok(Trained { series, held, scaling: trainee.scaler().map(scaling) })
    }

    fn conclude(&self, outcome: &Outcome<Trained>) -> Result<()> {
        outcome.trained.scaling.iter().try_for_each(|line| say(format_args!("{line}")))?;
        let held = outcome.trained.held.iter().enumerate();
        let mut rows: Vec<_> = held.map(|(rank, held)| (format!("rank {rank}"), *held)).collect();
        let (units, shards) = (self.model().elements().unwrap_or_default(), self.shards(outcome.ranks.len()));
        rows.push(("each rank, by formula".into(), peak_memory::sharded(&units, shards, &self.config())));
        rows.push(("DDP, by formula".into(), peak_memory::replicated(&units)));
        peak_memory::table(&rows).iter().try_for_each(|line| say(format_args!("{line}")))
    }

    fn report(&self, outcome: Outcome<Trained>) -> Report {
        let mut facts = vec![
            fact("steps", self.steps),
            fact("batch size, each rank", self.batch_size),
            fact("learning rate", self.lr),
            fact("sharded over", self.shards(outcome.ranks.len())),
            fact("layers compute in", format!("{:?}", self.param_dtype)),
        ];
        let total = |held: &PeakMemory| held.parameters + held.gradients + held.optimizer;
        for (rank, held) in outcome.trained.held.iter().enumerate() {
            let mega = format!("{:.1} MB", total(held) as f64 * 1e-6);
            facts.push(fact(&format!("parameters, gradients and Adam's state of rank {rank}"), mega));
        }
        facts.extend(outcome.trained.scaling.map(|line| fact("loss scale", line)));
        facts.extend(self.common.data.as_ref().map(|path| fact("data", path.display())));
        Report { facts, runs: vec![outcome.trained.series], ..Report::default() }
    }
}

impl Experiment for FsdpMlpOptions {
    options_of!(steps);
}

fn loss(model: &Fsdp<LargeModel>, (x, y): &(Tensor, Tensor)) -> Result<Tensor> {
    Ok(cross_entropy(&model.forward(x)?, y, None)?)
}

/// Returns the line about the final loss scale.
fn scaling(scaler: &LossScaler) -> String {
    let steps = match scaler.skipped() {
        0 => "no step was skipped".into(),
        1 => "1 step was skipped: a gradient was not finite".into(),
        more => format!("{more} steps were skipped: a gradient was not finite"),
    };
    format!("Loss scale {} at the end; {steps}", scaler.factor())
}

impl FsdpMlpOptions {
    fn build(&self, rank: &Rank) -> Result<Fsdp<LargeModel>> {
        let generator = SharedGenerator::from(Generator::new(self.common.seed));
        let builder = TorchInit::tensor_builder(&generator, DType::F32, &self.common.device()?);
        let (config, sizes) = (self.config(), self.model());
        let model = |units| LargeModel::new(&sizes, &Builder::from(units));
        let (comm, world_size) = (rank.comm.clone(), rank.comm.world_size());
        if self.sharding == Sharding::HybridShard {
            let shards = self.shards(world_size);
            // Neighbouring ranks, usually on one host, form a shard group.
            let mesh = Mesh::new(comm, &[("dp", world_size / shards), ("shard", shards)])?;
            let axes = ("shard", "dp");
            return Ok(Fsdp::hybrid(&mesh, axes, builder, &config, model)?);
        }
        Ok(Fsdp::new(comm, builder, &config, model)?)
    }
}
