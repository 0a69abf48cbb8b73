//! Data-parallel workload: a copy of the model on every rank.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use comm::Communicator;
use ddp::{Ddp, DdpConfig};
use experiment::error::Result;
use models::tutorials::transformer::Transformer;
use training::{Adam, AdamConfig, TorchInit};

use super::model::{generator, loss, share};
use super::train::{Train, timed};
use super::{Strategy, Training};

pub(super) struct Job {
    model: Ddp<Transformer>,
    optimizer: Adam,
    batch: (Tensor, Tensor),
    comm: Arc<dyn Communicator>,
}

impl Job {
    pub(super) fn new(training: &Training, comm: Arc<dyn Communicator>) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let (tokens, next) = training.sizes.batch(training.batch_size)?;
        let batch = (share(&tokens, rank, ranks)?, share(&next, rank, ranks)?);
        let random = generator();
        let builder = TorchInit::var_builder(&random, &VarMap::new(), DType::F32, &Device::Cpu);
        let mut config = DdpConfig { buffers: vec!["pe".into()], ..DdpConfig::default() };
        if let Strategy::Ddp { bucket_bytes } = training.strategy {
            config.bucket_bytes = bucket_bytes;
            // If a bucket is larger than the whole model, this makes the first one large enough that nothing overlaps.
            config.first_bucket_bytes = config.first_bucket_bytes.max(bucket_bytes / 25);
        }
        let sizes = training.sizes.transformer();
        let model =
            Ddp::new(comm.clone(), builder, &config, |builder| Transformer::new(builder, &sizes, &random))?;
        let named = model
            .parameters()
            .iter()
            .map(|parameter| (parameter.name().to_string(), parameter.var().clone()));
        let optimizer = Adam::named(named.collect::<Vec<_>>(), AdamConfig::default())?;
        Ok(Self { model, optimizer, batch, comm })
    }
}

impl Train for Job {
    fn step(&mut self) -> Result<[f64; 3]> {
        let Self { model, optimizer, batch, .. } = self;
        let forward = || Ok(loss(&model.forward_t(&batch.0, true)?, &batch.1)?);
        timed(optimizer, forward, |loss| Ok(model.backward(loss)?))
    }

    fn bytes_sent(&self) -> u64 {
        self.comm.stats().bytes_sent
    }

    fn parameters(&self) -> usize {
        self.model.vars().iter().map(|var| var.elem_count()).sum()
    }
}
