//! Data-parallel workload: a copy of the model on every rank.

use std::sync::Arc;

use bin::documents::shared::transformer::Transformer;
use candle_core::{DType, Device};
use candle_nn::VarMap;
use cli::error::Result;
use comm::Communicator;
use ddp::{Ddp, DdpConfig};
use training::{Adam, AdamConfig, TorchInit};

use super::model::{generator, loss, share};
use super::train::{Step, Workload, timed};
use super::{Strategy, Training};

pub(super) fn workload(training: &Training, comm: Arc<dyn Communicator>) -> Result<Workload> {
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
    let mut optimizer = Adam::named(model.named_vars(), AdamConfig::default())?;
    let vars = model.vars();
    Ok(Workload::new(&vars, move || {
        let sent = comm.stats().bytes_sent;
        let forward = || Ok(loss(&model.forward_t(&batch.0, true)?, &batch.1)?);
        let phases = timed(&mut optimizer, forward, |loss| Ok(model.backward(loss)?))?;
        Ok(Step { phases, bytes_sent: comm.stats().bytes_sent - sent })
    }))
}
