//! Loss scaling: gradients of f16 that would vanish are made larger, and made smaller again in f32.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A model whose gradients are scaled: what [`LossScaler::unscale`] must know of it.
pub trait ScaledModel {
    /// What its norm fails with.
    type Error: From<Error>;

    /// This rank's variables.
    fn scaled_vars(&self) -> Vec<Var>;

    /// The 2-norm of all gradients on all ranks: the same bits on each. To be called on every rank.
    ///
    /// # Errors
    /// Failures of communication.
    fn norm(&self, grads: &GradStore) -> std::result::Result<f64, Self::Error>;
}

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
/// use candle_core::backprop::GradStore;
/// use candle_core::{DType, Device, Var};
/// use candle_nn::Optimizer;
/// use training::{Adam, AdamConfig, Error, LossScaler, LossScalerConfig, ScaledModel, grad_norm};
///
/// struct Model(Var);
///
/// impl ScaledModel for Model {
///     type Error = Error;
///
///     fn scaled_vars(&self) -> Vec<Var> {
///         vec![self.0.clone()]
///     }
///
///     fn norm(&self, grads: &GradStore) -> Result<f64, Error> {
///         grad_norm(grads, &self.scaled_vars()) // over all ranks, where there are others
///     }
/// }
///
/// let model = Model(Var::zeros(3, DType::F16, &Device::Cpu)?);
/// let mut optimizer = Adam::new(model.scaled_vars(), AdamConfig::default())?;
/// let mut scaler = LossScaler::new(LossScalerConfig::default())?;
/// let loss = model.0.to_dtype(DType::F32)?.sum_all()?;
/// let mut grads = scaler.scale(&loss)?.backward()?;
/// if scaler.unscale(&model, &mut grads)? {
///     optimizer.step(&grads)?;
/// }
/// // 65536 is no number of f16: the step was skipped, and the next one has a smaller factor.
/// assert_eq!((scaler.factor(), scaler.skipped()), (32768.0, 1));
/// # Ok::<(), training::Error>(())
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
    /// [`Error::InvalidConfig`].
    pub fn new(config: LossScalerConfig) -> Result<Self> {
        let LossScalerConfig { scale, growth, backoff, growth_interval } = config;
        let refuse =
            |field, got, help| Err(Error::InvalidConfig { of: "LossScalerConfig", field, got, help });
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

    /// A loss, scaled: what backward is given. It should be f32: the factor may be no number of f16.
    ///
    /// # Errors
    /// candle's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok((loss * self.factor)?)
    }

    /// Divides what backward gave by the factor; true where the optimizer is to step. Chooses the factor of the next step. To be called
    /// on every rank, before clipping.
    ///
    /// Gradients of f16 and bf16 become f32, in which they do not vanish; optimizers of this crate take them.
    ///
    /// # Cost
    /// Two passes over this rank's gradients, and what the model's norm needs.
    ///
    /// # Errors
    /// candle's; those of the model's norm.
    pub fn unscale<M: ScaledModel>(
        &mut self,
        model: &M,
        grads: &mut GradStore,
    ) -> std::result::Result<bool, M::Error> {
        // The same number on all ranks, so that all decide the same.
        let finite = model.norm(grads)?.is_finite();
        if !finite {
            // A factor of 0 would hide every gradient from then on.
            self.factor = (self.factor * self.config.backoff).max(f64::MIN_POSITIVE);
            (self.good, self.skipped) = (0, self.skipped + 1);
            return Ok(false);
        }
        scale_wide(grads, &model.scaled_vars(), self.factor.recip()).map_err(Error::from)?;
        self.good += 1;
        if self.good >= self.config.growth_interval {
            self.factor = (self.factor * self.config.growth).min(f64::MAX);
            self.good = 0;
        }
        Ok(true)
    }
}

/// Multiplies gradients in f32 where they have fewer digits.
fn scale_wide(grads: &mut GradStore, vars: &[Var], factor: f64) -> candle_core::Result<()> {
    let mut seen = HashSet::new();
    for var in vars.iter().filter(|var| seen.insert(var.id())) {
        let Some(grad) = grads.remove(var) else { continue };
        let wide = match grad.dtype() {
            DType::F16 | DType::BF16 => grad.to_dtype(DType::F32)?,
            _ => grad,
        };
        grads.insert(var, wide.affine(factor, 0.0)?);
    }
    Ok(())
}
