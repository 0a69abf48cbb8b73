//! Tensor-parallel workload: every layer divided over the ranks.

use std::sync::Arc;

use ::tensor_parallel::{LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights};
use cli::error::Result;
use comm::{Communicator, Mesh};
use training::{Adam, AdamConfig};

use super::Training;
use super::model::generator;
use super::train::{Step, Workload, timed};

pub(super) fn workload(training: &Training, comm: Arc<dyn Communicator>) -> Result<Workload> {
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
    let model = TensorParallel::new(&mesh, &config, &weights, |builder| LanguageModel::new(builder, &sizes))?;
    let mut optimizer = Adam::named(model.named_vars(), AdamConfig::default())?;
    let (tokens, next) = training.sizes.batch(training.batch_size)?;
    let vars = model.vars();
    Ok(Workload::new(&vars, move || {
        let sent = model.stats().bytes_sent;
        let forward = || Ok(model.model()?.loss(&tokens, &next)?);
        let phases = timed(&mut optimizer, forward, |loss| Ok(model.backward(loss)?))?;
        Ok(Step { phases, bytes_sent: model.stats().bytes_sent - sent })
    }))
}
