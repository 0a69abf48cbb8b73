//! Stochastic gradient descent with momentum, by PyTorch's formulas.

mod fallback;
mod host;

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use crate::low_bits::{LOW_BITS, LowBits};
use crate::optimizer::steps_alone;
use crate::slot::{Reader, Slot, check_scale, slots};
use crate::state::{Buffer, DeferredCopy, on_host, state_dtype};
use crate::{Error, OptimizerState, Result};

const NAME: &str = "Sgd";
/// PyTorch's name of the direction.
const DIRECTION: &str = "momentum_buffer";

/// Hyperparameters of [`Sgd`]. The defaults are PyTorch's.
#[derive(Debug, Clone, PartialEq)]
pub struct SgdConfig {
    /// Learning rate, 0 or more. Default 0.001.
    pub learning_rate: f64,
    /// Factor of the last step's direction, 0 or more; 0 needs no state. Default 0.
    pub momentum: f64,
    /// A new gradient enters the direction with factor `1 - dampening`, except in the first step. Default 0.
    pub dampening: f64,
    /// Weight decay (L2 penalty), 0 or more. Default 0.
    pub weight_decay: f64,
    /// Nesterov momentum; needs momentum, and no dampening. Default false.
    pub nesterov: bool,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { learning_rate: 1e-3, momentum: 0., dampening: 0., weight_decay: 0., nesterov: false }
    }
}

impl SgdConfig {
    /// Checks that every field is in its range.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]: a value that is not finite, a negative one (except `dampening`), or `nesterov`
    /// without momentum or with dampening.
    pub fn validate(&self) -> Result<()> {
        let invalid = |field, got, help| Err(Error::InvalidConfig { of: NAME, field, got, help });
        let not_negative = [
            ("learning_rate", self.learning_rate),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
        ];
        for (field, got) in not_negative {
            if !(got.is_finite() && got >= 0.) {
                return invalid(field, got, "it must be a finite number, 0 or more");
            }
        }
        if !self.dampening.is_finite() {
            return invalid("dampening", self.dampening, "it must be a finite number");
        }
        if self.nesterov && self.momentum == 0. {
            return invalid("momentum", self.momentum, "nesterov needs a momentum above 0");
        }
        if self.nesterov && self.dampening != 0. {
            return invalid("dampening", self.dampening, "nesterov needs a dampening of 0");
        }
        Ok(())
    }
}

/// Stochastic gradient descent with momentum, weight decay and Nesterov momentum.
///
/// With gradient g, parameter p and direction b, a step is, as in PyTorch:
/// `g += weight_decay * p`; `b = g` at the first step, then `b = momentum * b + (1 - dampening) * g`;
/// `p -= learning_rate * d` with d = b, or `g + momentum * b` with `nesterov`, or g without momentum.
/// A parameter without a gradient is not changed, nor is its direction.
///
/// On a CPU parameters are updated in place in one parallel pass, f16 and bf16 block by block in f32; the bits do not
/// depend on the number of threads. Elsewhere the step uses candle's tensor operations. f16 and bf16 have an f32 direction, and
/// what they have no room for is kept, as in [`Adam`](crate::Adam).
///
/// # Cost
/// No memory without momentum; one copy of the parameters with it. For f16 and bf16 2 bytes more each (4 on devices other than
/// a CPU).
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_nn::Optimizer;
/// use training::{Sgd, SgdConfig};
///
/// let weight = Var::new(&[1f32, 2.], &Device::Cpu)?;
/// let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, ..SgdConfig::default() };
/// let mut sgd = Sgd::new(vec![weight.clone()], config)?;
/// sgd.backward_step(&weight.as_tensor().sum_all()?)?;
/// assert_eq!(weight.to_vec1::<f32>()?, [0.9, 1.9]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Sgd {
    config: SgdConfig,
    /// A slot's state is its parameter's direction.
    slots: Vec<Slot<Buffer>>,
    /// For each slot, whether weight decay applies to its parameter.
    decays: Vec<bool>,
}

impl Sgd {
    /// Creates an optimizer of named parameters; the names are the keys of its saved state. Variables of non-float
    /// dtypes are ignored.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::DuplicateName`], [`Error::DuplicateVariable`].
    pub fn named(vars: impl IntoIterator<Item = (String, Var)>, config: SgdConfig) -> Result<Self> {
        config.validate()?;
        let slots = slots(NAME, vars)?;
        Ok(Self { config, decays: vec![true; slots.len()], slots })
    }

    /// Limits weight decay to the parameters for whose names `decays` returns true, as [`Adam::decaying`](crate::Adam::decaying).
    #[must_use]
    pub fn decaying(mut self, decays: impl Fn(&str) -> bool) -> Self {
        self.decays = self.slots.iter().map(|slot| decays(&slot.name)).collect();
        self
    }

    /// Current hyperparameters.
    pub fn config(&self) -> &SgdConfig {
        &self.config
    }

    /// Steps with gradients multiplied by `scale`: equal to the bit to scaling them
    /// before a step, without the extra pass over the gradients. For clipping ([`clip_factor`](crate::internal::clip_factor)).
    /// Gradients of f16 and bf16 are scaled in f32, without rounding in between.
    ///
    /// # Errors
    /// A gradient that does not fit its parameter; [`Error::InvalidConfig`] for a `scale` or learning rate that is
    /// not finite, or another invalid field.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use candle_nn::Optimizer;
    /// use training::{Sgd, SgdConfig};
    ///
    /// let weight = Var::new(&[1f32], &Device::Cpu)?;
    /// let mut sgd = Sgd::new(vec![weight.clone()], SgdConfig { learning_rate: 0.5, ..SgdConfig::default() })?;
    /// let grads = weight.as_tensor().sum_all()?.backward()?;
    /// sgd.step_scaled(&grads, 0.5)?;
    /// assert_eq!(weight.to_vec1::<f32>()?, [0.75]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn step_scaled(&mut self, grads: &GradStore, scale: f64) -> candle_core::Result<()> {
        // `set_learning_rate` cannot return an error, so its value is checked here.
        self.config.validate()?;
        check_scale(NAME, scale)?;
        let without_decay = SgdConfig { weight_decay: 0., ..self.config.clone() };
        for (slot, decays) in self.slots.iter_mut().zip(&self.decays) {
            if let Some(grad) = grads.get(&slot.var) {
                slot.check(NAME, grad)?;
                let config = if *decays { &self.config } else { &without_decay };
                if slot.steps_in_place() {
                    host::step(&slot.var, &mut slot.low, grad, &mut slot.state, config, scale)?;
                } else {
                    fallback::step(&slot.var, &mut slot.low, grad, &mut slot.state, config, scale)?;
                }
            }
        }
        Ok(())
    }
}

/// Steps a parameter along a direction: `p -= learning_rate * (direction + weight_decay * p)`.
pub(crate) fn step_plain(
    var: &Var,
    low: &mut LowBits,
    direction: &Tensor,
    [learning_rate, weight_decay]: [f64; 2],
) -> candle_core::Result<()> {
    let config = SgdConfig { learning_rate, weight_decay, ..SgdConfig::default() };
    match on_host(var) {
        true => host::step(var, low, direction, &mut None, &config, 1.),
        false => fallback::step(var, low, direction, &mut None, &config, 1.),
    }
}

steps_alone!(Sgd, SgdConfig);

impl OptimizerState for Sgd {
    fn state_later(&self) -> Result<Vec<(String, DeferredCopy)>> {
        let mut entries = vec![];
        for Slot { name, var, low, state } in &self.slots {
            if let Some(direction) = state {
                entries.push((format!("{name}.{DIRECTION}"), direction.to_tensor_later(var)?));
            }
            let low = low.to_tensor_later(var)?;
            entries.extend(low.map(|low| (format!("{name}.{LOW_BITS}"), low)));
        }
        Ok(entries)
    }

    fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let mut reader = Reader::new(NAME, state);
        let mut directions = vec![];
        for Slot { name, var, .. } in &self.slots {
            let direction = reader.optional(name, DIRECTION, var.dims(), state_dtype(var))?;
            let direction = direction.map(|tensor| Buffer::from_tensor(tensor, var)).transpose()?;
            directions.push((reader.low_bits(name, var)?, direction));
        }
        reader.finish()?;
        for (slot, (low, direction)) in self.slots.iter_mut().zip(directions) {
            (slot.low, slot.state) = (low, direction);
        }
        Ok(())
    }
}
