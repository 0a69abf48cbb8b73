//! Pipeline workload: consecutive blocks of layers on consecutive ranks.

use std::sync::Arc;
use std::time::Instant;

use ::pipeline::{ActionKind, Cost, Pipeline, PipelineConfig, Split};
use bin::documents::pipeline_tutorial::transformer_modules;
use candle_core::{DType, Device};
use candle_nn::{Optimizer, VarMap};
use cli::error::{Error, Result};
use comm::Communicator;
use training::{Adam, AdamConfig, TorchInit};

use super::model::{generator, loss};
use super::train::{Step, Workload};
use super::{Strategy, Training};

pub(super) fn workload(training: &Training, comm: Arc<dyn Communicator>) -> Result<Workload> {
    let Strategy::Pipeline { schedule, micro_batches } = training.strategy else {
        return Err(Error::NoResult { reason: "it is no pipeline".into() });
    };
    let (random, sizes) = (generator(), training.sizes.transformer());
    let modules = transformer_modules(&sizes, &random);
    let builder = |map: &VarMap| TorchInit::var_builder(&random, map, DType::F32, &Device::Cpu);
    let batch = training.sizes.batch(training.batch_size)?;
    let example = batch.0.narrow(0, 0, training.batch_size / micro_batches)?;
    let split = Split::Balanced(Cost::ForwardTime);
    let config = PipelineConfig { schedule, micro_batches, split, ..PipelineConfig::default() };
    let mut model = Pipeline::new(comm, &modules, &builder, &example, loss, &config)?;
    let mut optimizer = Adam::named(model.named_vars(), AdamConfig::default())?;
    let vars = model.vars();
    Ok(Workload::new(&vars, move || {
        let sent = model.stats().bytes_sent;
        let began = Instant::now();
        let step = model.step(Some(&batch.0), Some(&batch.1))?;
        let both = began.elapsed().as_secs_f64();
        optimizer.step(&step.grads)?;
        let forward = step.spans.iter().filter(|span| span.action.kind == ActionKind::Forward);
        let forward: f64 = forward.map(|span| span.end - span.start).sum();
        let phases = [forward, both - forward, began.elapsed().as_secs_f64() - both];
        Ok(Step { phases, bytes_sent: model.stats().bytes_sent - sent })
    }))
}
