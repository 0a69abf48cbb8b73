//! Tensor-parallel workload: every layer divided over the ranks.

use std::sync::Arc;

use ::tensor_parallel::{LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights};
use candle_core::Tensor;
use comm::{Communicator, Mesh};
use experiment::error::Result;
use training::{Adam, AdamConfig};

use super::Training;
use super::model::generator;
use super::train::{Train, timed};

pub(super) struct Job {
    model: TensorParallel<LanguageModel>,
    optimizer: Adam,
    batch: (Tensor, Tensor),
}

impl Job {
    pub(super) fn new(training: &Training, comm: Arc<dyn Communicator>) -> Result<Self> {
        let ranks = comm.world_size();
        let mesh = Mesh::new(comm, &[("tp", ranks)])?;
        let sizes = training.sizes.transformer();
        let sizes = LanguageModelConfig {
            vocab_size: sizes.vocab_size,
            d_model: sizes.d_model,
            num_heads: sizes.num_heads,
            d_ff: sizes.d_ff,
            num_layers: sizes.num_layers,
            max_len: sizes.max_len,
            dropout: sizes.dropout,
            mask: sizes.mask,
        };
        let (config, weights) = (TensorParallelConfig::default(), Weights::Random(generator()));
        let model =
            TensorParallel::new(&mesh, &config, &weights, |builder| LanguageModel::new(builder, &sizes))?;
        let optimizer = Adam::named(model.named_vars(), AdamConfig::default())?;
        Ok(Self { model, optimizer, batch: training.sizes.batch(training.batch_size)? })
    }
}

impl Train for Job {
    fn step(&mut self) -> Result<[f64; 3]> {
        let Self { model, optimizer, batch, .. } = self;
        let forward = || Ok(model.model()?.loss(&batch.0, &batch.1)?);
        timed(optimizer, forward, |loss| Ok(model.backward(loss)?))
    }

    fn bytes_sent(&self) -> u64 {
        self.model.stats().bytes_sent
    }

    fn parameters(&self) -> usize {
        self.model.vars().iter().map(|var| var.elem_count()).sum()
    }
}
