//! `tensor-parallel-transformer`: a language model of the handbook's layers.

mod data;
mod options;

use candle_core::{Device, Tensor};
use report::Report;
use report::metrics::MetricsWriter;
use sampler::{Generator, SharedGenerator};
use tensor_parallel::{
    LanguageModel, LanguageModelConfig, Result as LayerResult, ShardBuilder, TensorParallel,
    TensorParallelConfig, Weights,
};

pub use options::TensorParallelTransformerOptions;

use crate::error::Result;
use crate::experiment::Experiment;
use crate::options::CommonOptions;
use crate::python::Float;
use crate::rank::{Outcome, Rank};
use crate::trainer::{CheckpointOptions, RunEnd, RunIdentity, keeps_losses, parts};

use super::mesh::MeshOptions;
use super::run::{self, RunConfig, Task, Trained};
use super::{OnMesh, table};

/// Rows of tokens, one longer than what the model is shown; where weights come from.
pub struct Setup {
    rows: Vec<Vec<u32>>,
    weights: Weights,
}

impl OnMesh for TensorParallelTransformerOptions {
    fn mesh(&self) -> &MeshOptions {
        &self.mesh
    }

    fn set_world_size(&mut self, world_size: usize) {
        self.common.ranks.world_size = Some(world_size);
    }
}

impl Experiment for TensorParallelTransformerOptions {
    const NAME: &'static str = "tensor-parallel-transformer";
    const WORLD_SIZE: usize = 2;
    type Setup = Setup;
    type Alone = usize;
    type Trained = Trained;

    fn common(&self) -> &CommonOptions {
        &self.common
    }

    fn with_common(&self, common: CommonOptions) -> Self {
        Self { common, ..self.clone() }
    }

    fn checkpoints(&self) -> Option<&CheckpointOptions> {
        Some(&self.checkpoints)
    }

    fn identity(&self, world_size: usize) -> RunIdentity {
        let settings = [
            ("--lr", self.lr.to_string()),
            ("--batch-size", self.batch_size.to_string()),
            ("--samples", self.samples.to_string()),
            ("--length", self.length.to_string()),
            ("--dropout", self.dropout.to_string()),
            ("--no-mask", self.no_mask.to_string()),
            ("--vocab-size", self.vocab_size.to_string()),
            ("--d-model", self.d_model.to_string()),
            ("--num-heads", self.num_heads.to_string()),
            ("--d-ff", self.model().hidden().to_string()),
            ("--num-layers", self.num_layers.to_string()),
            ("--max-len", self.max_len.to_string()),
        ];
        // Any number of ranks that the layers are divided over gives the same numbers, but for rounding.
        let copies = self.mesh.sizes(world_size).map_or(world_size, |(dp, _)| dp);
        let common = self.common.settings(self.checkpoints());
        RunIdentity::new(Self::NAME, copies, common.into_iter().chain(settings))
            .ending(RunEnd::Epochs(self.epochs))
    }

    fn check_checkpoint(&self, world_size: usize) -> Result<()> {
        parts::check(&self.checkpoints, &self.identity(world_size)).map(drop)
    }

    fn check(&self, world_size: usize) -> Result<()> {
        let (_, tp) = self.mesh.sizes(world_size)?;
        self.check_sizes((world_size, tp))
    }

    fn setup(&self) -> Result<Setup> {
        self.common.device()?;
        let mut generator = Generator::new(self.common.seed);
        let rows = data::rows(self, &mut generator)?;
        let weights = match &self.common.init {
            Some(path) => Weights::File(path.clone()),
            None => Weights::Random(SharedGenerator::from(generator)),
        };
        let model = |builder| LanguageModel::new(builder, &self.model());
        weights.check(&TensorParallelConfig::default(), model)?;
        Ok(Setup { rows, weights })
    }

    fn alone(&self, _: Setup, world_size: usize, _: Option<&mut MetricsWriter>) -> Result<usize> {
        Ok(world_size)
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let sizes = self.mesh.sizes(rank.comm.world_size())?;
        if let (true, Some(row)) = (self.mesh.sequence_parallel, setup.rows.first()) {
            MeshOptions::divides("--data", row.len() - 1, sizes.1)?;
        }
        let config = RunConfig {
            sizes,
            parallel: TensorParallelConfig {
                sequence_parallel: self.mesh.sequence_parallel,
                seed: self.common.seed,
                device: self.common.device()?,
                ..TensorParallelConfig::default()
            },
            weights: setup.weights,
            epochs: self.epochs,
            batch_size: self.batch_size,
            lr: self.lr,
            report: keeps_losses(&self.common, &self.checkpoints),
            save: self.common.save.as_deref(),
            checkpoints: &self.checkpoints,
            run: self.identity(rank.comm.world_size()),
        };
        let device = config.parallel.device.clone();
        run::train(&NextToken { rows: setup.rows, device, model: self.model() }, &config, rank)
    }

    fn conclude(&self, world_size: &usize, outcome: &Outcome<Trained>) -> Result<()> {
        let Trained { own, data_parallel, .. } = &outcome.trained;
        table::print(self.mesh.sizes(*world_size)?, own, data_parallel)
    }

    fn report(&self, world_size: usize, outcome: Outcome<Trained>) -> Report {
        let fact = |name: &str, value: String| (name.to_string(), value);
        let mut facts = self.mesh.facts(world_size);
        facts.push(fact("batch size, each data-parallel rank", self.batch_size.to_string()));
        facts.push(fact("learning rate", self.lr.to_string()));
        facts.push(fact("dropout", self.dropout.to_string()));
        facts.push(fact("d_model", self.d_model.to_string()));
        facts.push(fact("layers", self.num_layers.to_string()));
        Report { facts, runs: vec![outcome.trained.series], ..Report::default() }
    }
}

struct NextToken {
    rows: Vec<Vec<u32>>,
    device: Device,
    model: LanguageModelConfig,
}

impl Task for NextToken {
    type Model = LanguageModel;

    fn model(&self, builder: ShardBuilder) -> LayerResult<LanguageModel> {
        LanguageModel::new(builder, &self.model)
    }

    fn loss(&self, parallel: &TensorParallel<LanguageModel>, samples: &[usize]) -> Result<Tensor> {
        let (tokens, next) = data::batch(&self.rows, samples, &self.device)?;
        Ok(parallel.model().loss(&tokens, &next)?)
    }

    fn samples(&self) -> usize {
        self.rows.len()
    }

    fn line(&self, epoch: usize, batch: usize, loss: f32) -> String {
        format!("Epoch {epoch}, Batch {batch}, Loss: {}", Float(loss.into()))
    }
}
