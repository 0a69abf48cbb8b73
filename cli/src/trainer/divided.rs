//! Training strategy of a model whose layers are divided over ranks (tensor parallelism).

use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::Optimizer;
use comm::{Communicator, Mesh, Stats};
use ops::activation_bytes;
use report::metrics::MemoryUse;
use strategy::DistributedModel;
use tensor_parallel::TensorParallel;
use training::{Adam, Checkpoint, Checkpoints, Contents};

use crate::error::Result;
use crate::held::{gradient_bytes, memory_use};
use crate::options::with_fallback_hint;

use super::{Position, Strategy};

/// A model divided over the ranks of a mesh, with its optimizer and its loss.
pub struct Divided<M, B, L> {
    parallel: TensorParallel<M>,
    optimizer: Adam,
    loss: L,
    batch: PhantomData<fn(&B)>,
    /// The groups along `tp` and along `dp`.
    groups: Vec<Arc<dyn Communicator>>,
    /// Bytes of gradients and of activations, measured in the first step.
    first: Option<(u64, u64)>,
}

impl<M, B, L: Fn(&TensorParallel<M>, &B) -> Result<Tensor>> Divided<M, B, L> {
    /// `loss` computes the loss of the model on a batch (`&B`); the mesh has the axes `tp` and `dp`.
    ///
    /// # Errors
    /// A mesh without them.
    pub fn new(parallel: TensorParallel<M>, optimizer: Adam, loss: L, mesh: &Mesh) -> Result<Self> {
        let groups = vec![mesh.axis("tp")?.clone(), mesh.axis("dp")?.clone()];
        Ok(Self { parallel, optimizer, loss, batch: PhantomData, groups, first: None })
    }

    /// Returns the divided model.
    pub fn parallel(&self) -> &TensorParallel<M> {
        &self.parallel
    }
}

impl<M, B, L: Fn(&TensorParallel<M>, &B) -> Result<Tensor>> Strategy for Divided<M, B, L> {
    type Batch = B;

    fn name(&self, _: usize) -> String {
        let [tp, dp] = [0, 1].map(|axis: usize| self.groups[axis].world_size());
        format!("tp {tp}, dp {dp}")
    }

    fn step(&mut self, at: Position, batch: &B) -> Result<Option<Tensor>> {
        self.parallel.begin_step(at.step as u64);
        let loss = tracing::info_span!("forward").in_scope(|| (self.loss)(&self.parallel, batch))?;
        let activations = self.first.map_or_else(|| activation_bytes(&loss, []) as u64, |(_, first)| first);
        let gradients = self.parallel.backward(&loss)?;
        if self.first.is_none() {
            self.first = Some((gradient_bytes(&self.parallel.vars(), &gradients), activations));
        }
        tracing::info_span!("optimizer").in_scope(|| self.optimizer.step(&gradients))?;
        Ok(Some(loss))
    }

    fn held(&self) -> Result<MemoryUse> {
        memory_use(&self.parallel.vars(), &self.optimizer, self.first)
    }

    fn stats(&self) -> Stats {
        self.parallel.stats()
    }

    fn groups(&self) -> Vec<Arc<dyn Communicator>> {
        self.groups.clone()
    }

    fn save(&self, to: &Checkpoints, checkpoint: Checkpoint) -> Result<()> {
        self.parallel.save_checkpoint(to, Some(&self.optimizer), &checkpoint)?;
        Ok(())
    }

    fn load(&mut self, from: &Contents) -> Result<()> {
        self.parallel.load_checkpoint(from, Some(&mut self.optimizer)).map_err(with_fallback_hint)?;
        Ok(())
    }
}
