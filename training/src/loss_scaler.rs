//! Loss scaling: scales the loss up so that f16 gradients do not underflow, and gradients down again in f32.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// A model whose gradients are scaled: what [`LossScaler::unscale`] needs of it.
pub trait ScaledModel {
    /// Error type of its norm.
    type Error: From<Error>;

    /// This rank's variables.
    fn scaled_vars(&self) -> Vec<Var>;

    /// The 2-norm of all gradients on all ranks: the same bits on each. A collective: every rank must call it.
    ///
    /// # Errors
    /// Failures of communication.
    fn norm(&self, grads: &GradStore) -> std::result::Result<f64, Self::Error>;
}

/// How a [`LossScaler`] adapts its factor. The defaults are those of PyTorch's `GradScaler`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScalerConfig {
    /// Initial factor, above 0. Default: 65536.
    pub scale: f64,
    /// Multiplies the factor after `growth_interval` good steps, above 1. Default: 2.
    pub growth: f64,
    /// Multiplies the factor after a gradient that is not finite, between 0 and 1. Default: 0.5.
    pub backoff: f64,
    /// Consecutive good steps after which the factor grows, 1 or more. Default: 2000.
    pub growth_interval: usize,
}

impl Default for LossScalerConfig {
    fn default() -> Self {
        Self { scale: 65536.0, growth: 2.0, backoff: 0.5, growth_interval: 2000 }
    }
}

/// State of a [`LossScaler`] for a checkpoint: with it, a resumed run continues as if it had not been interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// Bits of the factor, since decimal digits might not restore it exactly.
    factor: u64,
    good: usize,
    skipped: usize,
}

/// Scales losses by the largest factor that keeps gradients finite, the same on every rank: if any rank's gradient is
/// not finite, all ranks skip the step.
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
    /// Good steps since the factor last changed.
    good: usize,
    skipped: usize,
}

impl LossScaler {
    /// Creates a scaler with the initial factor.
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

    /// The current factor.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Number of steps skipped so far.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// State to save in a checkpoint.
    pub fn state(&self) -> LossScalerState {
        LossScalerState { factor: self.factor.to_bits(), good: self.good, skipped: self.skipped }
    }

    /// Restores a state returned by [`LossScaler::state`].
    pub fn resume(&mut self, state: LossScalerState) {
        (self.factor, self.good, self.skipped) = (f64::from_bits(state.factor), state.good, state.skipped);
    }

    /// Multiplies a loss by the factor, for backward. It should be f32: the factor may exceed the range of f16.
    ///
    /// # Errors
    /// candle's.
    pub fn scale(&self, loss: &Tensor) -> Result<Tensor> {
        Ok(ops::tape::scale(loss, self.factor)?)
    }

    /// Divides gradients by the factor and adapts the factor for the next step. Returns whether the optimizer should
    /// step. A collective: every rank must call it, before clipping.
    ///
    /// Gradients of f16 and bf16 become f32, in which they do not underflow; this crate's optimizers accept them.
    ///
    /// # Cost
    /// Two passes over this rank's gradients, and the cost of the model's norm.
    ///
    /// # Errors
    /// candle's; errors of the model's norm.
    pub fn unscale<M: ScaledModel>(
        &mut self,
        model: &M,
        grads: &mut GradStore,
    ) -> std::result::Result<bool, M::Error> {
        // All ranks get the same norm, so all decide the same.
        let finite = model.norm(grads)?.is_finite();
        if !finite {
            // A factor of 0 would make every later gradient 0; gradients are divided by it in f32.
            self.factor = (self.factor * self.config.backoff).max(f64::from(f32::MIN_POSITIVE));
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

/// Multiplies gradients by `factor`, those of f16 and bf16 in f32.
fn scale_wide(grads: &mut GradStore, vars: &[Var], factor: f64) -> candle_core::Result<()> {
    let mut seen = HashSet::new();
    for var in vars.iter().filter(|var| seen.insert(var.id())) {
        let Some(grad) = grads.remove(var) else { continue };
        let wide = grad.to_dtype(ops::wide_dtype(grad.dtype()))?;
        grads.insert(var, wide.affine(factor, 0.0)?);
    }
    Ok(())
}
