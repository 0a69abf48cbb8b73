//! Training strategy of a model that is cut into stages (pipeline parallelism).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Tensor, Var};
use candle_nn::Optimizer;
use comm::{Communicator, Stats, broadcast_object};
use pipeline::Pipeline;
use report::metrics::MemoryUse;
use strategy::DistributedModel;
use training::{Checkpoint, Checkpoints, Contents, OptimizerState};

use crate::error::Result;
use crate::held::{gradient_bytes, memory_use};
use crate::options::with_fallback_hint;
use crate::rank::Measured;

use super::{Position, Strategy};

/// This rank's stages of a pipeline, with their optimizer.
pub struct Staged<O> {
    pipeline: Pipeline,
    /// Number of the current step, for those who draw random numbers by it.
    now: Arc<AtomicUsize>,
    optimizer: O,
    name: String,
    /// The group of all ranks, and which of them has the log.
    world: (Arc<dyn Communicator>, usize),
    /// Bytes of gradients and of activations, measured in the first step.
    first: Option<(u64, u64)>,
    /// Seconds of computation so far.
    busy: f64,
}

impl<O: Optimizer + OptimizerState> Staged<O> {
    /// `now` is set to the number of each step before it begins; `name` is that of the run in a report; `world` is the
    /// group of all ranks, and which of them has the log.
    pub fn new(
        pipeline: Pipeline,
        now: Arc<AtomicUsize>,
        optimizer: O,
        name: String,
        world: (Arc<dyn Communicator>, usize),
    ) -> Self {
        Self { pipeline, now, optimizer, name, world, first: None, busy: 0.0 }
    }

    /// Returns the pipeline.
    pub fn into_pipeline(self) -> Pipeline {
        self.pipeline
    }
}

impl<O: Optimizer + OptimizerState> Strategy for Staged<O> {
    /// Inputs and targets of all micro-batches.
    type Batch = (Tensor, Tensor);

    fn name(&self, _: usize) -> String {
        self.name.clone()
    }

    fn step(&mut self, at: Position, (input, target): &(Tensor, Tensor)) -> Result<Option<Tensor>> {
        self.now.store(at.step, Ordering::Relaxed);
        self.pipeline.measure_activations(self.first.is_none());
        let step = self.pipeline.step(Some(input), Some(target))?;
        if self.first.is_none() {
            let activations = step.activation_bytes.unwrap_or_default() as u64;
            self.first = Some((gradient_bytes(&self.pipeline.vars(), &step.grads), activations));
        }
        self.optimizer.step(&step.grads)?;
        self.busy += step.spans.iter().map(|span| span.end - span.start).sum::<f64>();
        Ok(step.loss.map(|loss| Tensor::new(loss, &Device::Cpu)).transpose()?)
    }

    fn held(&self) -> Result<MemoryUse> {
        let buffers = self.pipeline.buffers().iter().map(|(_, var)| var.clone());
        let held: Vec<Var> = self.pipeline.vars().into_iter().chain(buffers).collect();
        memory_use(&held, &self.optimizer, self.first)
    }

    fn stats(&self) -> Stats {
        self.pipeline.stats()
    }

    fn measured(&self, measured: Measured, _: &Stats) -> Measured {
        measured.computing(self.busy)
    }

    fn save(&self, to: &Checkpoints, mut checkpoint: Checkpoint) -> Result<()> {
        let (world, reporter) = &self.world;
        // Rank 0 writes it, but another rank has the log.
        checkpoint.extra = broadcast_object(&**world, &checkpoint.extra, *reporter)?;
        self.pipeline.save_checkpoint(to, Some(&self.optimizer), &checkpoint)?;
        Ok(())
    }

    fn load(&mut self, from: &Contents) -> Result<()> {
        self.pipeline.load_checkpoint(from, Some(&mut self.optimizer)).map_err(with_fallback_hint)?;
        Ok(())
    }
}
