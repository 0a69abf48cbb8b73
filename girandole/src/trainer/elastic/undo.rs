//! Undoing a step in which a rank was lost.

use candle_core::{Tensor, Var};
use sampler::SamplerState;
use strategy::DistributedModel;
use training::build::Model;
use training::{LossScaler, LossScalerState};

use crate::Result;
use crate::trainer::Trainer;

/// What a step has changed before a rank can be lost in it.
pub(in crate::trainer) struct BeforeStep {
    order: SamplerState,
    /// Running statistics, which its forward changes. Empty in runs that are not elastic.
    buffers: Vec<(Var, Tensor)>,
    loss_scale: Option<LossScalerState>,
}

impl<M: Model> Trainer<'_, M> {
    pub(in crate::trainer) fn before_step(&self) -> Result<BeforeStep> {
        let kept = |(_, var): (String, Var)| Ok((var.clone(), var.as_detached_tensor().copy()?));
        let buffers = match self.config.fewest_ranks {
            None => Vec::new(),
            Some(_) => self.model.buffers().into_iter().map(kept).collect::<Result<_>>()?,
        };
        let loss_scale = self.model.loss_scaler().map(LossScaler::state);
        Ok(BeforeStep { order: self.batches.state(), buffers, loss_scale })
    }

    /// Goes back to before a step: the same rows are used again.
    pub(in crate::trainer) fn undo_step(&mut self, before: &BeforeStep) -> Result<()> {
        self.batches.resume(&before.order)?;
        before.buffers.iter().try_for_each(|(var, value)| var.set(value))?;
        self.model.set_loss_scale(before.loss_scale);
        Ok(())
    }
}
