//! Training strategy of a rank's pipeline stages, and its checkpoint contents.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::{Device, Tensor};
use candle_nn::Optimizer;
use comm::{Communicator, Stats, broadcast_object};
use experiment::error::Result;
use experiment::held::{bytes, gradient_bytes};
use experiment::options::with_fallback_hint;
use experiment::rank::Measured;
use experiment::trainer::{self, CheckpointForm, Parts, Position, Source, Strategy};
use report::metrics::MemoryUse;
use training::{Checkpoint, Checkpoints, Contents, OptimizerState, Sgd, SgdConfig};

use crate::experiments::tokens::Batch;

use super::BuiltPipeline;

/// A pipeline with its optimizer.
pub(super) struct PipelineStrategy {
    pub(super) made: BuiltPipeline,
    optimizer: Sgd,
    name: String,
    /// The group of all ranks, and which of them has the log.
    world: (Arc<dyn Communicator>, usize),
    /// Bytes of gradients and of activations, measured in the first step.
    first: Option<(u64, u64)>,
    /// Seconds of computation so far.
    busy: f64,
}

impl PipelineStrategy {
    pub(super) fn new(
        made: BuiltPipeline,
        learning_rate: f64,
        name: String,
        world: (Arc<dyn Communicator>, usize),
    ) -> Result<Self> {
        let config = SgdConfig { learning_rate, ..SgdConfig::default() };
        let optimizer = Sgd::named(made.pipeline.named_vars(), config)?;
        Ok(Self { made, optimizer, name, world, first: None, busy: 0.0 })
    }
}

impl Strategy for PipelineStrategy {
    type Batch = Batch;

    fn name(&self, _: usize) -> String {
        self.name.clone()
    }

    fn step(&mut self, at: Position, (input, target): &Batch) -> Result<Option<Tensor>> {
        let BuiltPipeline { pipeline, step } = &mut self.made;
        step.store(at.step, Ordering::Relaxed);
        pipeline.measure_activations(self.first.is_none());
        let step = pipeline.step(Some(input), Some(target))?;
        if self.first.is_none() {
            let activations = step.activation_bytes.unwrap_or_default() as u64;
            self.first = Some((gradient_bytes(&pipeline.vars(), &step.grads), activations));
        }
        self.optimizer.step(&step.grads)?;
        self.busy += step.spans.iter().map(|span| span.end - span.start).sum::<f64>();
        Ok(step.loss.map(|loss| Tensor::new(loss, &Device::Cpu)).transpose()?)
    }

    fn held(&self) -> Result<MemoryUse> {
        let (gradients, activations) = self.first.unwrap_or_default();
        Ok(MemoryUse {
            weights: bytes(self.made.pipeline.vars().iter().map(|var| var.as_tensor())),
            gradients,
            optimizer: bytes(self.optimizer.state()?.iter().map(|(_, tensor)| tensor)),
            activations,
            ..MemoryUse::default()
        })
    }

    fn stats(&self) -> Stats {
        self.made.pipeline.stats()
    }

    fn measured(&self, measured: Measured, _: &Stats) -> Measured {
        measured.computing(self.busy)
    }

    fn kept(&mut self) -> CheckpointForm<'_> {
        CheckpointForm::Parts(self)
    }
}

impl Parts for PipelineStrategy {
    fn save(&self, to: &Checkpoints, mut checkpoint: Checkpoint) -> Result<()> {
        let (world, reporter) = &self.world;
        // Rank 0 writes it, but another rank has the log.
        checkpoint.extra = broadcast_object(&**world, &checkpoint.extra, *reporter)?;
        self.made.pipeline.save_checkpoint(to, Some(&self.optimizer), &checkpoint)?;
        Ok(())
    }

    fn load(&mut self, from: &Contents) -> Result<()> {
        self.made.pipeline.load_checkpoint(from, Some(&mut self.optimizer)).map_err(with_fallback_hint)?;
        Ok(())
    }
}

/// The batches of an epoch, the same in every epoch.
pub(super) struct Batches(pub(super) Vec<Batch>);

impl Source for Batches {
    type Batch = Batch;

    fn remaining(&self, at: Position) -> usize {
        self.0.len().saturating_sub(at.batch)
    }

    fn batches(&mut self, at: Position) -> Result<trainer::Batches<Batch>> {
        let left: Vec<Batch> = self.0.iter().skip(at.batch).cloned().collect();
        Ok(Box::new(left.into_iter().map(|batch| Ok((batch, 0)))))
    }

    fn changed(&self, then: usize) -> String {
        format!("; it was made with world size {then}, the model is cut again")
    }
}
