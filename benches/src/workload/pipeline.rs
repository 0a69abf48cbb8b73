//! Pipeline workload: consecutive blocks of layers on consecutive ranks.

use std::sync::Arc;
use std::time::Instant;

use ::pipeline::{ActionKind, Cost, Pipeline, PipelineConfig, Split};
use bin::experiments::pipeline_transformer::transformer_modules;
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, VarMap};
use comm::Communicator;
use experiment::error::{Error, Result};
use training::{Adam, AdamConfig, TorchInit};

use super::model::{generator, loss};
use super::train::Train;
use super::{Strategy, Training};

pub(super) struct Job {
    model: Pipeline,
    optimizer: Adam,
    batch: (Tensor, Tensor),
}

impl Job {
    pub(super) fn new(training: &Training, comm: Arc<dyn Communicator>) -> Result<Self> {
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
        let model = Pipeline::new(comm, &modules, &builder, &example, loss, &config)?;
        let optimizer = Adam::named(model.named_vars(), AdamConfig::default())?;
        Ok(Self { model, optimizer, batch })
    }
}

impl Train for Job {
    fn step(&mut self) -> Result<[f64; 3]> {
        let began = Instant::now();
        let step = self.model.step(Some(&self.batch.0), Some(&self.batch.1))?;
        let both = began.elapsed().as_secs_f64();
        self.optimizer.step(&step.grads)?;
        let forward = step.spans.iter().filter(|span| span.action.kind == ActionKind::Forward);
        let forward: f64 = forward.map(|span| span.end - span.start).sum();
        Ok([forward, both - forward, began.elapsed().as_secs_f64() - both])
    }

    fn bytes_sent(&self) -> u64 {
        self.model.stats().bytes_sent
    }

    fn parameters(&self) -> usize {
        self.model.vars().iter().map(|var| var.elem_count()).sum()
    }
}
