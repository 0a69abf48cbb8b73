//! Loss scaling: gradients of f16 that would vanish are made larger, and made smaller again in f32.

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use serde::{Deserialize, Serialize};
use training::scale_grads;

use crate::{Error, Fsdp, Result};

/// How a [`LossScaler`] finds its factor. The defaults are those of PyTorch's `GradScaler`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScalerConfig {
    /// The factor at first, above 0. Default: 65536.
    pub scale: f64,
    /// What it is multiplied with after `growth_interval` good steps, above 1. Default: 2.
    pub growth: f64,
    /// What it is multiplied with where a gradient was not finite, between 0 and 1. Default: 0.5.
    pub backoff: f64,
    /// Good steps in a row after which it grows, 1 or more. Default: 2000.
    pub growth_interval: usize,
}

impl Default for LossScalerConfig {
    fn default() -> Self {
        Self { scale: 65536.0, growth: 2.0, backoff: 0.5, growth_interval: 2000 }
    }
}

/// What a [`LossScaler`] has come to, for a checkpoint: with it, a run goes on as if it had not been interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// The bits of the factor, which decimal digits may not give back.
    factor: u64,
    good: usize,
    skipped: usize,
}

/// Scales losses by a factor as large as gradients can bear, the same on every rank: a step in which any rank's gradient is
/// not finite is skipped by all.
///
/// ```
/// # use std::sync::Arc;
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear};
/// # use comm::{Local, LocalConfig};
/// use fsdp::{Fsdp, FsdpConfig, LossScaler, LossScalerConfig, MixedPrecision};
///
/// # let comm = Arc::new(Local::group(1, &LocalConfig::default())?.remove(0));
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let mixed_precision = MixedPrecision { param_dtype: Some(DType::F16), ..MixedPrecision::default() };
/// let config = FsdpConfig { mixed_precision, ..FsdpConfig::default() };
/// let fsdp = Fsdp::new(comm, vb, &config, |units| units.unit(|vb| linear(1, 1, vb)))?;
/// let mut optimizer = candle_nn::SGD::new(fsdp.vars(), 0.1)?;
/// let mut scaler = LossScaler::new(LossScalerConfig::default())?;
/// let loss = fsdp.forward(&Tensor::new(&[[1f32]], &Device::Cpu)?)?.to_dtype(DType::F32)?.sum_all()?;
/// let mut grads = fsdp.backward(&scaler.scale(&loss)?)?;
/// if scaler.unscale(&fsdp, &mut grads)? {
///     optimizer.step(&grads)?;
/// }
/// // 65536 is no number of f16: the step was skipped, and the next one has a smaller factor.
/// assert_eq!(scaler.factor(), 32768.0);
/// # Ok::<(), fsdp::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LossScaler {
    config: LossScalerConfig,
    factor: f64,
    /// Good steps since it last changed.
    good: usize,
    skipped: usize,
}

impl LossScaler {
    /// A scaler with the first factor.
    ///
    /// # Errors
    /// [`Error::InvalidScaler`].
    pub fn new(config: LossScalerConfig) -> Result<Self> {
        let LossScalerConfig { scale, growth, backoff, growth_interval } = config;
        let refuse = |field, got, help| Err(Error::InvalidScaler { field, got, help });
        if !(scale.is_finite() && scale > 0.0) {
            return refuse("scale", scale, "give a finite number above 0");
        }
        if !(growth.is_finite() && growth > 1.0) {
            return refuse("growth", growth, "give a finite number above 1");
        }
        if !(backoff > 0.0 && backoff < 1.0) {
            return refuse("backoff", backoff, "give a number between 0 and 1");
        }
        if growth_interval == 0 {
            return refuse("growth_interval", 0.0, "give 1 or more");
        }
        Ok(Self { config, factor: scale, good: 0, skipped: 0 })
    }

    /// What losses are multiplied with now.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Steps that were skipped so far.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// What a checkpoint keeps of it.
    pub fn state(&self) -> LossScalerState {
        LossScalerState { factor: self.factor.to_bits(), good: self.good, skipped: self.skipped }
    }

    /// Goes on from a state that [`LossScaler::state`] gave.
    pub fn resume(&mut self, state: LossScalerState) {
        (self.factor, self.good, self.skipped) = (f64::from_bits(state.factor), state.good, state.skipped);
    }

    /// A loss, scaled: what [`Fsdp::backward`] is given. It should be f32: the factor may be no number of f16.
    ///
    /// # Errors
    /// candle's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok((loss * self.factor)?)
    }

    /// Divides what [`Fsdp::backward`] gave by the factor; true where the optimizer is to step. Chooses the factor of the next
    /// step. To be called on every rank, before clipping.
    ///
    /// # Cost
    /// Two passes over this rank's gradients, and an all-reduce of 8 bytes.
    ///
    /// # Errors
    /// candle's; failures of communication.
    pub fn unscale<M>(&mut self, fsdp: &Fsdp<M>, grads: &mut GradStore) -> Result<bool> {
        // The same number on all ranks, so that all decide the same.
        let finite = fsdp.grad_norm(grads)?.is_finite();
        if !finite {
            // A factor of 0 would hide every gradient from then on.
            self.factor = (self.factor * self.config.backoff).max(f64::MIN_POSITIVE);
            (self.good, self.skipped) = (0, self.skipped + 1);
            return Ok(false);
        }
        scale_grads(grads, &fsdp.vars(), self.factor.recip())?;
        self.good += 1;
        if self.good >= self.config.growth_interval {
            self.factor = (self.factor * self.config.growth).min(f64::MAX);
            self.good = 0;
        }
        Ok(true)
    }
}
