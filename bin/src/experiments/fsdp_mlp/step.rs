//! Training step of `fsdp-mlp` (forward, backward and optimizer), and its checkpoint contents.

use candle_core::Tensor;
use candle_nn::{Module, Optimizer};
use comm::{Stats, peak_rss_bytes};
use experiment::error::Result;
use experiment::held::bytes;
use experiment::options::with_fallback_hint;
use experiment::rank::Measured;
use experiment::trainer::{CheckpointForm, Parts, Position, Strategy, checkpoint_mismatch};
use fsdp::{Fsdp, LossScaler, LossScalerConfig, LossScalerState};
use training::{Adam, AdamConfig, Checkpoint, Checkpoints, Contents, cross_entropy};

use super::memory::PeakMemory;
use super::model::LargeModel;
use super::options::FsdpMlpOptions;

/// Key of the loss scaler's state in a checkpoint.
const SCALE: &str = "scale";

/// A sharded model with its optimizer and loss scaler.
pub(super) struct FsdpStrategy {
    pub(super) fsdp: Fsdp<LargeModel>,
    pub(super) optimizer: Adam,
    scaler: Option<LossScaler>,
    /// Maximum bytes of activations kept for backward.
    pub(super) activations: usize,
}

impl PeakMemory {
    pub(super) fn of(trainee: &FsdpStrategy) -> Self {
        let memory = trainee.fsdp.memory();
        Self {
            parameters: memory.parameters.peak,
            gradients: memory.gradients.peak,
            optimizer: trainee.optimizer.state_bytes(),
            activations: Some(trainee.activations),
            process: peak_rss_bytes(),
        }
    }

    /// Returns the same in the form of `--metrics`.
    pub(super) fn split(&self, trainee: &FsdpStrategy) -> report::metrics::MemoryUse {
        let weights = bytes(trainee.fsdp.vars().iter().map(|var| var.as_tensor()));
        report::metrics::MemoryUse {
            weights,
            copies: (self.parameters as u64).saturating_sub(weights),
            gradients: self.gradients as u64,
            optimizer: self.optimizer as u64,
            activations: self.activations.unwrap_or_default() as u64,
            sent: 0.0,
        }
    }
}

impl Strategy for FsdpStrategy {
    /// Inputs of shape (batch, features) and their classes.
    type Batch = (Tensor, Tensor);

    fn name(&self, _: usize) -> String {
        "FSDP".into()
    }

    fn step(&mut self, _: Position, (x, y): &(Tensor, Tensor)) -> Result<Option<Tensor>> {
        let Self { fsdp, optimizer, scaler, activations } = self;
        let loss = tracing::info_span!("forward").in_scope(|| cross_entropy(&fsdp.forward(x)?, y, None))?;
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

    fn held(&self) -> Result<report::metrics::MemoryUse> {
        Ok(PeakMemory::of(self).split(self))
    }

    fn stats(&self) -> Stats {
        self.fsdp.stats()
    }

    /// Counts communication in all groups of the model: hybrid sharding uses more than the group of all ranks.
    fn measured(&self, measured: Measured, begun: &Stats) -> Measured {
        measured.communicating(self.fsdp.stats().busy_ns - begun.busy_ns)
    }

    fn kept(&mut self) -> CheckpointForm<'_> {
        CheckpointForm::Parts(self)
    }
}

impl Parts for FsdpStrategy {
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

impl FsdpStrategy {
    pub(super) fn new(fsdp: Fsdp<LargeModel>, options: &FsdpMlpOptions) -> Result<Self> {
        let config = AdamConfig { learning_rate: options.lr, ..AdamConfig::default() };
        let optimizer = Adam::named(fsdp.named_vars(), config)?;
        let scaler = |scale| LossScaler::new(LossScalerConfig { scale, ..LossScalerConfig::default() });
        Ok(Self { fsdp, optimizer, scaler: options.loss_scale.map(scaler).transpose()?, activations: 0 })
    }

    /// Returns the line about the final loss scale, if there is one.
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
