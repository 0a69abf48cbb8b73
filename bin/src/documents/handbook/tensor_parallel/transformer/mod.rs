//! `tensor-parallel-transformer`: a language model of the handbook's layers, divided over ranks.

mod options;

use candle_core::{Device, Tensor};
use cli::prelude::*;
use sampler::Generator;
use tensor_parallel::{
    LanguageModel, LanguageModelConfig, Result as LayerResult, ShardBuilder, TensorParallel,
    TensorParallelConfig, Weights,
};

use super::mesh::{self, MeshOptions, OnMesh, Task, TensorParallelRunConfig, Trained, weights};
use crate::documents::shared::python::Float;
use crate::documents::shared::transformer::rows::{self, Row};

pub use options::TensorParallelTransformerOptions;

/// Rows of tokens, one token longer than the model's input, and the source of the weights.
pub struct Setup {
    rows: Vec<Row>,
    weights: Weights,
}

impl OnMesh for TensorParallelTransformerOptions {
    fn mesh(&self) -> &MeshOptions {
        &self.mesh
    }
}

impl Command for TensorParallelTransformerOptions {
    const NAME: &'static str = "tensor-parallel-transformer";
    const WORLD_SIZE: usize = 2;
    const JOINT: &'static [&'static str] = &["save"];
    type Setup = Setup;
    type Trained = Trained;

    options_of!(common, checkpoints);

    fn settings(&self, _: usize) -> Vec<(String, String)> {
        let d_ff = self.model().hidden().to_string();
        let data = settings!(self, lr, batch_size, samples, length, dropout, no_mask);
        let model = settings!(self, vocab_size, d_model, num_heads, d_ff = d_ff, num_layers, max_len);
        [data, model].concat()
    }

    fn check(&self, world_size: usize) -> Result<()> {
        let (_, tp) = self.mesh.sizes(world_size)?;
        self.check_sizes(world_size, tp)
    }

    fn setup(&self) -> Result<Setup> {
        self.common.device()?;
        let mut generator = Generator::new(self.common.seed);
        let rows = match &self.common.data {
            Some(path) => rows::read(path, self.vocab_size, self.max_len)?,
            None => rows::sequences(&mut generator, self.samples, self.length, self.vocab_size)?,
        };
        let weights = weights(&self.common, generator);
        let model = |builder| LanguageModel::new(builder, &self.model());
        weights.check(&TensorParallelConfig::default(), model)?;
        Ok(Setup { rows, weights })
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let sizes = self.mesh.sizes(rank.comm.world_size())?;
        if let (true, Some(row)) = (self.mesh.sequence_parallel, setup.rows.first()) {
            MeshOptions::divides("--data", row.len() - 1, sizes.1)?;
        }
        let config = TensorParallelRunConfig::of(self, setup.weights, self.batch_size, self.lr, rank)?;
        let device = config.parallel.device.clone();
        mesh::train(self, &NextToken { rows: setup.rows, device, model: self.model() }, &config, rank)
    }

    fn conclude(&self, outcome: &Outcome<Trained>) -> Result<()> {
        mesh::print(self.mesh.sizes(outcome.ranks.len())?, &outcome.trained)
    }

    fn report(&self, outcome: Outcome<Trained>) -> Report {
        let mut facts = self.mesh.facts(outcome.ranks.len());
        facts.push(fact("batch size, each data-parallel rank", self.batch_size));
        facts.push(fact("learning rate", self.lr));
        facts.push(fact("dropout", self.dropout));
        facts.push(fact("d_model", self.d_model));
        facts.push(fact("layers", self.num_layers));
        Report { facts, runs: vec![outcome.trained.series], ..Report::default() }
    }
}

impl Experiment for TensorParallelTransformerOptions {
    options_of!(epochs);

    fn copies(&self, world_size: usize) -> usize {
        self.mesh.copies(world_size)
    }
}

struct NextToken {
    rows: Vec<Row>,
    device: Device,
    model: LanguageModelConfig,
}

impl Task for NextToken {
    type Model = LanguageModel;

    fn model(&self, builder: ShardBuilder) -> LayerResult<LanguageModel> {
        LanguageModel::new(builder, &self.model)
    }

    fn loss(&self, parallel: &TensorParallel<LanguageModel>, samples: &[usize]) -> Result<Tensor> {
        let rows: Vec<&Row> = samples.iter().map(|&sample| &self.rows[sample]).collect();
        let (tokens, next) = rows::batch(&rows, &self.device)?;
        Ok(parallel.model()?.loss(&tokens, &next)?)
    }

    fn samples(&self) -> usize {
        self.rows.len()
    }

    fn line(&self, epoch: usize, batch: usize, loss: f32) -> String {
        format!("Epoch {epoch}, Batch {batch}, Loss: {}", Float(loss.into()))
    }
}
