//! FSDP workload: every parameter divided over the ranks; each block is a unit.

use std::sync::Arc;

use bin::documents::shared::transformer::{PositionalEncoding, TransformerBlock, TransformerConfig};
use candle_core::{DType, Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Embedding, ModuleT, embedding};
use cli::error::Result;
use comm::Communicator;
use fsdp::{Fsdp, FsdpConfig, Unit, UnitBuilder};
use ops::{Linear, linear};
use sampler::SharedGenerator;
use training::{Adam, AdamConfig, TorchInit};

use super::Training;
use super::model::{generator, loss, share};
use super::train::{Step, Workload, timed};

/// Embedding and positional encoding.
struct Front(Embedding, PositionalEncoding);

impl Module for Front {
    fn forward(&self, tokens: &Tensor) -> CandleResult<Tensor> {
        self.1.forward(&self.0.forward(tokens)?)
    }
}

struct Model {
    front: Unit<Front>,
    blocks: Vec<Unit<TransformerBlock>>,
    out: Unit<Linear>,
}

impl Model {
    fn new(
        units: &UnitBuilder<'_>,
        config: &TransformerConfig,
        random: &SharedGenerator,
    ) -> CandleResult<Self> {
        let &TransformerConfig { vocab_size, d_model, num_layers, max_len, .. } = config;
        let front = units.unit(|builder| {
            let tokens = embedding(vocab_size, d_model, builder.pp("embedding"))?;
            Ok(Front(tokens, PositionalEncoding::new(max_len, d_model, builder.pp("pos_encoding"))?))
        })?;
        let block = |layer: usize| {
            let units = units.pp("layers").pp(layer);
            units.unit(|builder| TransformerBlock::new(builder, config, random))
        };
        let blocks = (0..num_layers).map(block).collect::<CandleResult<_>>()?;
        let out = units.pp("out_linear").unit(|builder| linear(d_model, vocab_size, builder))?;
        Ok(Self { front, blocks, out })
    }
}

impl ModuleT for Model {
    fn forward_t(&self, tokens: &Tensor, train: bool) -> CandleResult<Tensor> {
        let x = self.front.forward(tokens)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward_t(&x, train))?;
        self.out.forward(&x)
    }
}

pub(super) fn workload(training: &Training, comm: Arc<dyn Communicator>) -> Result<Workload> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (tokens, next) = training.sizes.batch(training.batch_size)?;
    let batch = (share(&tokens, rank, ranks)?, share(&next, rank, ranks)?);
    let (random, sizes) = (generator(), training.sizes.transformer());
    let builder = TorchInit::tensor_builder(&random, DType::F32, &Device::Cpu);
    let config = FsdpConfig { buffers: vec!["pe".into()], ..FsdpConfig::default() };
    let model = Fsdp::new(comm.clone(), builder, &config, |units| Model::new(&units, &sizes, &random))?;
    let mut optimizer = Adam::named(model.named_vars(), AdamConfig::default())?;
    let vars = model.vars();
    Ok(Workload::new(&vars, move || {
        let sent = comm.stats().bytes_sent;
        let forward = || Ok(loss(&model.forward_t(&batch.0, true)?, &batch.1)?);
        let phases = timed(&mut optimizer, forward, |loss| Ok(model.backward(loss)?))?;
        Ok(Step { phases, bytes_sent: comm.stats().bytes_sent - sent })
    }))
}
