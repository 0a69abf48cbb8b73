//! Training strategy of a model whose parameters are sharded over the ranks (FSDP).

use std::marker::PhantomData;

use candle_core::Tensor;
use candle_nn::Optimizer;
use comm::Stats;
use fsdp::{Fsdp, LossScaler, LossScalerState};
use report::metrics::MemoryUse;
use strategy::DistributedModel;
use training::{Adam, Checkpoint, Checkpoints, Contents};

use crate::error::Result;
use crate::held::bytes;
use crate::options::with_fallback_hint;
use crate::rank::Measured;

use super::{Position, Strategy, checkpoint_mismatch};

/// Key of the loss scaler's state in a checkpoint.
const SCALE: &str = "scale";

/// A sharded model with its optimizer, its loss, and a loss scaler if it has one.
pub struct Sharded<M, B, L> {
    fsdp: Fsdp<M>,
    optimizer: Adam,
    scaler: Option<LossScaler>,
    loss: L,
    batch: PhantomData<fn(&B)>,
    /// Maximum bytes of activations kept for backward.
    activations: usize,
}

impl<M, B, L: Fn(&Fsdp<M>, &B) -> Result<Tensor>> Sharded<M, B, L> {
    /// `loss` computes the loss of the model on a batch (`&B`).
    pub fn new(fsdp: Fsdp<M>, optimizer: Adam, scaler: Option<LossScaler>, loss: L) -> Self {
        Self { fsdp, optimizer, scaler, loss, batch: PhantomData, activations: 0 }
    }

    /// Returns the sharded model.
    pub fn fsdp(&self) -> &Fsdp<M> {
        &self.fsdp
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> &Adam {
        &self.optimizer
    }

    /// Returns the loss scaler, if there is one.
    pub fn scaler(&self) -> Option<&LossScaler> {
        self.scaler.as_ref()
    }

    /// Returns the maximum bytes of activations kept for backward, of all steps so far.
    pub fn activations(&self) -> usize {
        self.activations
    }
}

impl<M, B, L: Fn(&Fsdp<M>, &B) -> Result<Tensor>> Strategy for Sharded<M, B, L> {
    type Batch = B;

    fn name(&self, _: usize) -> String {
        "FSDP".into()
    }

    fn step(&mut self, _: Position, batch: &B) -> Result<Option<Tensor>> {
        let Self { fsdp, optimizer, scaler, loss, activations, .. } = self;
        let loss = tracing::info_span!("forward").in_scope(|| loss(fsdp, batch))?;
        *activations = fsdp.activation_bytes(&loss).max(*activations);
        let (grads, sound) = match scaler {
            None => (fsdp.backward(&loss)?, true),
            Some(scaler) => {
                let mut grads = fsdp.backward(&scaler.scale(&loss)?)?;
                let sound = scaler.unscale(fsdp, &mut grads)?;
                (grads, sound)
            }
        };
        if sound {
            tracing::info_span!("optimizer").in_scope(|| optimizer.step(&grads))?;
        }
        Ok(Some(loss))
    }

    fn held(&self) -> Result<MemoryUse> {
        let memory = self.fsdp.memory();
        let weights = bytes(self.fsdp.vars().iter().map(|var| var.as_tensor()));
        Ok(MemoryUse {
            weights,
            copies: (memory.parameters.peak as u64).saturating_sub(weights),
            gradients: memory.gradients.peak as u64,
            optimizer: self.optimizer.state_bytes() as u64,
            activations: self.activations as u64,
            sent: 0.0,
        })
    }

    fn stats(&self) -> Stats {
        self.fsdp.stats()
    }

    /// Counts communication in all groups of the model: hybrid sharding uses more than the group of all ranks.
    fn measured(&self, measured: Measured, begun: &Stats) -> Measured {
        measured.communicating(self.fsdp.stats().busy_ns - begun.busy_ns)
    }

    fn save(&self, to: &Checkpoints, mut checkpoint: Checkpoint) -> Result<()> {
        if let Some(scaler) = &self.scaler {
            let state = serde_json::to_value(scaler.state());
            checkpoint.extra[SCALE] = state
                .map_err(|reason| checkpoint_mismatch(format!("its state cannot be written: {reason}")))?;
        }
        self.fsdp.save_checkpoint(to, Some(&self.optimizer), &checkpoint)?;
        Ok(())
    }

    fn load(&mut self, from: &Contents) -> Result<()> {
        let extra = self.fsdp.load_checkpoint(from, Some(&mut self.optimizer)).map_err(with_fallback_hint)?;
        let state: Option<LossScalerState> = serde_json::from_value(extra[SCALE].clone())
            .map_err(|reason| checkpoint_mismatch(format!("it was not written by this program: {reason}")))?;
        if let (Some(scaler), Some(state)) = (&mut self.scaler, state) {
            scaler.resume(state);
        }
        Ok(())
    }
}
