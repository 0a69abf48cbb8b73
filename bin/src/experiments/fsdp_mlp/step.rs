//! One step: forward, backward over shards, and the optimizer's.

use candle_core::Tensor;
use candle_nn::{Module, Optimizer};
use fsdp::{Fsdp, LossScaler, LossScalerConfig};
use training::{Adam, AdamConfig, cross_entropy};

use crate::error::Result;
use crate::models::large::LargeModel;

use super::options::FsdpMlpOptions;

/// A model with what trains it.
pub(super) struct Trainee {
    pub(super) fsdp: Fsdp<LargeModel>,
    pub(super) optimizer: Adam,
    pub(super) scaler: Option<LossScaler>,
}

/// What a step gave.
pub(super) struct Stepped {
    pub(super) loss: Tensor,
    /// Bytes that the layers had computed for backward.
    pub(super) activations: usize,
}

impl Trainee {
    pub(super) fn new(fsdp: Fsdp<LargeModel>, options: &FsdpMlpOptions) -> Result<Self> {
        let config = AdamConfig { learning_rate: options.lr, ..AdamConfig::default() };
        let optimizer = Adam::named(fsdp.named_vars(), config)?;
        let scaler = |scale| LossScaler::new(LossScalerConfig { scale, ..LossScalerConfig::default() });
        Ok(Self { fsdp, optimizer, scaler: options.loss_scale.map(scaler).transpose()? })
    }

    /// Learns from one batch: inputs of shape (batch, features) and their classes.
    pub(super) fn step(&mut self, (x, y): (&Tensor, &Tensor)) -> Result<Stepped> {
        let Self { fsdp, optimizer, scaler } = self;
        let loss = tracing::info_span!("forward").in_scope(|| cross_entropy(&fsdp.forward(x)?, y, None))?;
        let activations = fsdp.activation_bytes(&loss);
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
        Ok(Stepped { loss, activations })
    }

    /// What there is to say of the loss's factor in the end, where it has one.
    pub(super) fn scaling(&self) -> Option<String> {
        let scaler = self.scaler.as_ref()?;
        let steps = match scaler.skipped() {
            0 => "no step was skipped".into(),
            1 => "1 step was skipped: a gradient was not finite".into(),
            more => format!("{more} steps were skipped: a gradient was not finite"),
        };
        Some(format!("Loss scale {} at the end; {steps}", scaler.factor()))
    }
}
