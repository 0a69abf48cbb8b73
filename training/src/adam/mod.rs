//! Adam and AdamW, by PyTorch's formulas.

mod fallback;
mod host;

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var, bail};
use ops::kernels;

use crate::low_bits::{LOW_BITS, LowBits, is_narrow};
use crate::optimizer::steps_alone;
use crate::slot::{Reader, Slot, check_scale, slots};
use crate::state::{Buffer, DeferredCopy, state_dtype};
use crate::{Error, OptimizerState, Result};

const NAME: &str = "Adam";

/// Hyperparameters of [`Adam`]. The default is PyTorch's `Adam`, [`AdamConfig::adamw`] its `AdamW`.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamConfig {
    /// Learning rate, 0 or more. Default 0.001.
    pub learning_rate: f64,
    /// Decay rate of the mean of the gradients, 0 to 1 (exclusive). Default 0.9.
    pub beta1: f64,
    /// Decay rate of the mean of the squared gradients, 0 to 1 (exclusive). Default 0.999.
    pub beta2: f64,
    /// Added to the square root in the denominator, 0 or more. Default 1e-8.
    pub eps: f64,
    /// Weight decay, 0 or more. Default 0; AdamW's is 0.01.
    pub weight_decay: f64,
    /// Whether the decay is applied to the parameter directly (AdamW) or added to the gradient (L2 penalty). Default
    /// false.
    pub decoupled_weight_decay: bool,
}

impl Default for AdamConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.,
            decoupled_weight_decay: false,
        }
    }
}

impl AdamConfig {
    /// The defaults of PyTorch's `AdamW`.
    pub fn adamw() -> Self {
        Self { weight_decay: 1e-2, decoupled_weight_decay: true, ..Self::default() }
    }

    /// Checks that every field is in its range.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]: a value that is negative or not finite, a beta of 1 or more.
    pub fn validate(&self) -> Result<()> {
        let invalid = |field, got, help| Err(Error::InvalidConfig { of: NAME, field, got, help });
        for (field, got) in
            [("learning_rate", self.learning_rate), ("eps", self.eps), ("weight_decay", self.weight_decay)]
        {
            if !(got.is_finite() && got >= 0.) {
                return invalid(field, got, "it must be a finite number, 0 or more");
            }
        }
        for (field, got) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0. ..1.).contains(&got) {
                return invalid(field, got, "it must be a number from 0 to 1, but not 1");
            }
        }
        Ok(())
    }
}

/// Adam, or AdamW: steps along the mean of past gradients, divided by the root of the mean of their squares.
///
/// With gradient g, parameter p, means m and v, at a parameter's step t, as in PyTorch:
/// `g += weight_decay * p`, or decoupled `p -= learning_rate * weight_decay * p`; `m += (1 - beta1) (g - m)`;
/// `v = beta2 * v + (1 - beta2) g^2`; `p -= learning_rate / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)`.
/// A parameter without a gradient is not changed, and its t does not advance.
///
/// On a CPU parameters are updated in place in one parallel pass, f16 and bf16 block by block in f32; the bits do not
/// depend on the number of threads. Elsewhere the step uses candle's tensor operations. f16 and bf16 have f32 means, and what
/// they have no room for is kept: steps of bf16 are to the bit those of an f32 parameter, of which the parameter is the rounded
/// number, where plain bf16 would stand still (a step is often below half the distance to the next number).
///
/// # Cost
/// Memory for two copies of the parameters; for f16 and bf16 8 bytes for the means and 2 for what is kept (4 on devices other
/// than a CPU), each.
///
/// # Source
/// Kingma and Ba, "Adam" (2015), algorithm 1; Loshchilov and Hutter, "Decoupled weight decay regularization" (2019).
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_nn::Optimizer;
/// use training::{Adam, AdamConfig};
///
/// let weight = Var::new(&[1f64, 2.], &Device::Cpu)?;
/// let config = AdamConfig { learning_rate: 0.1, ..AdamConfig::adamw() };
/// let mut adamw = Adam::new(vec![weight.clone()], config)?;
/// adamw.backward_step(&weight.as_tensor().sum_all()?)?;
/// assert!((weight.to_vec1::<f64>()?[0] - 0.899).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Adam {
    config: AdamConfig,
    slots: Vec<Slot<AdamState>>,
    /// For each slot, whether weight decay applies to its parameter.
    decays: Vec<bool>,
}

/// Optimizer state of one parameter.
#[derive(Debug)]
struct AdamState {
    step: i64,
    of_gradients: Buffer,
    of_squares: Buffer,
}

/// Coefficients of one step, the same for all elements of a parameter.
#[derive(Debug, Clone, Copy)]
struct Factors<T = f64> {
    /// Multiplies the gradient first.
    scale: T,
    /// Times the parameter, is added to the gradient (L2 penalty).
    penalty: T,
    /// Multiplies the parameter first (decoupled weight decay).
    shrink: T,
    beta1: T,
    /// One minus `beta1`.
    fresh1: T,
    beta2: T,
    /// One minus `beta2`.
    fresh2: T,
    /// Minus the learning rate, divided by the bias correction of the mean.
    rate: T,
    /// Square root of the bias correction of the mean of squares.
    root: T,
    eps: T,
}

impl AdamConfig {
    fn factors(&self, step: i64, scale: f64) -> Factors {
        let (penalty, shrink) = if self.decoupled_weight_decay {
            (0., 1. - self.learning_rate * self.weight_decay)
        } else {
            (self.weight_decay, 1.)
        };
        let correction = |beta: f64| 1. - beta.powf(step as f64);
        Factors {
            scale,
            penalty,
            shrink,
            beta1: self.beta1,
            fresh1: 1. - self.beta1,
            beta2: self.beta2,
            fresh2: 1. - self.beta2,
            rate: -self.learning_rate / correction(self.beta1),
            root: correction(self.beta2).sqrt(),
            eps: self.eps,
        }
    }
}

fn on_cuda(
    var: &Var,
    low: &mut LowBits,
    grad: &Tensor,
    means: &AdamState,
    factors: Factors,
) -> candle_core::Result<()> {
    let (Buffer::Tensor(of_gradients), Buffer::Tensor(of_squares)) = (&means.of_gradients, &means.of_squares)
    else {
        bail!("adam: a mean was lost");
    };
    let Factors { scale, penalty, shrink, fresh1, beta2, fresh2, rate, root, eps, .. } = factors;
    let numbers =
        [scale, penalty, shrink, fresh1, beta2, fresh2, rate, root, eps].map(|number| number as f32);
    let (grad, means) = (grad.contiguous()?, [of_gradients, of_squares]);
    if !is_narrow(var) {
        return kernels::adam(var, &grad, means, numbers);
    }
    let wide = Var::from_tensor(&low.wide(var)?)?;
    kernels::adam(&wide, &grad, means, numbers)?;
    low.set(var, &wide.as_detached_tensor())
}

impl Adam {
    /// Creates an optimizer of named parameters; the names are the keys of its saved state. Variables of non-float
    /// dtypes are ignored.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::DuplicateName`], [`Error::DuplicateVariable`].
    pub fn named(vars: impl IntoIterator<Item = (String, Var)>, config: AdamConfig) -> Result<Self> {
        config.validate()?;
        let slots = slots(NAME, vars)?;
        Ok(Self { config, decays: vec![true; slots.len()], slots })
    }

    /// Limits weight decay to the parameters for whose names `decays` returns true: usually weights of layers, not
    /// biases or norms.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use candle_nn::Optimizer;
    /// use training::{Adam, AdamConfig};
    ///
    /// let (weight, bias) = (Var::new(&[1f64], &Device::Cpu)?, Var::new(&[1f64], &Device::Cpu)?);
    /// let config = AdamConfig { learning_rate: 0.1, weight_decay: 0.5, ..AdamConfig::adamw() };
    /// let named = [("fc.weight".into(), weight.clone()), ("fc.bias".into(), bias.clone())];
    /// let mut adamw = Adam::named(named, config)?.decaying(|name| name.ends_with("weight"));
    /// // Next to no gradient (of a product with 0 candle gives none): what changes is decay.
    /// adamw.backward_step(&((weight.as_tensor() + bias.as_tensor())? * 1e-300)?)?;
    /// assert_eq!((weight.to_vec1::<f64>()?, bias.to_vec1::<f64>()?), (vec![0.95], vec![1.0]));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    #[must_use]
    pub fn decaying(mut self, decays: impl Fn(&str) -> bool) -> Self {
        self.decays = self.slots.iter().map(|slot| decays(&slot.name)).collect();
        self
    }

    /// Bytes of optimizer state.
    pub fn state_bytes(&self) -> usize {
        let means = |var: &Var| var.elem_count() * state_dtype(var).size_in_bytes() * 2;
        let of = |slot: &Slot<AdamState>| means(&slot.var) + slot.low.bytes(&slot.var);
        self.slots.iter().filter(|slot| slot.state.is_some()).map(of).sum()
    }

    /// Current hyperparameters.
    pub fn config(&self) -> &AdamConfig {
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
    /// use training::{Adam, AdamConfig};
    ///
    /// let weight = Var::new(&[1f64], &Device::Cpu)?;
    /// let mut adam = Adam::new(vec![weight.clone()], AdamConfig { learning_rate: 0.5, ..AdamConfig::default() })?;
    /// let grads = weight.as_tensor().sum_all()?.backward()?;
    /// adam.step_scaled(&grads, 0.25)?;
    /// assert!((weight.to_vec1::<f64>()?[0] - 0.5).abs() < 1e-6);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn step_scaled(&mut self, grads: &GradStore, scale: f64) -> candle_core::Result<()> {
        self.check(grads, scale)?;
        for (slot, decays) in self.slots.iter_mut().zip(&self.decays) {
            let Some(grad) = grads.get(&slot.var) else { continue };
            let on_host = slot.steps_in_place();
            let means = match &mut slot.state {
                Some(means) => means,
                none => none.insert(AdamState {
                    step: 0,
                    of_gradients: Buffer::zeros(&slot.var)?,
                    of_squares: Buffer::zeros(&slot.var)?,
                }),
            };
            let mut factors = self.config.factors(means.step + 1, scale);
            if !decays {
                (factors.penalty, factors.shrink) = (0., 1.);
            }
            if on_host {
                host::step(&slot.var, &mut slot.low, grad, means, factors)?;
            } else if kernels::knows(&slot.var) {
                on_cuda(&slot.var, &mut slot.low, grad, means, factors)?;
            } else {
                fallback::step(&slot.var, &mut slot.low, grad, means, factors)?;
            }
            means.step += 1;
        }
        Ok(())
    }

    /// Checks what a step is given, before anything changes.
    pub(crate) fn check(&self, grads: &GradStore, scale: f64) -> Result<()> {
        // `set_learning_rate` cannot return an error, so its value is checked here.
        self.config.validate()?;
        check_scale(NAME, scale)?;
        let mut given = self.slots.iter().filter_map(|slot| Some((slot, grads.get(&slot.var)?)));
        given.try_for_each(|(slot, grad)| slot.check(NAME, grad))
    }
}

steps_alone!(Adam, AdamConfig);

impl OptimizerState for Adam {
    fn state_later(&self) -> Result<Vec<(String, DeferredCopy)>> {
        let mut entries = vec![];
        for Slot { name, var, low, state } in &self.slots {
            if let Some(means) = state {
                let step = Tensor::new(means.step, &Device::Cpu)?;
                entries.push((format!("{name}.step"), DeferredCopy::done(step)));
                entries.push((format!("{name}.exp_avg"), means.of_gradients.to_tensor_later(var)?));
                entries.push((format!("{name}.exp_avg_sq"), means.of_squares.to_tensor_later(var)?));
                let low = low.to_tensor_later(var)?;
                entries.extend(low.map(|low| (format!("{name}.{LOW_BITS}"), low)));
            }
        }
        Ok(entries)
    }

    fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let mut reader = Reader::new(NAME, state);
        let mut all = vec![];
        for Slot { name, var, .. } in &self.slots {
            let low = reader.low_bits(name, var)?;
            let means = match reader.optional(name, "step", &[], DType::I64)? {
                None => None,
                Some(step) => {
                    let step = step.to_scalar::<i64>()?;
                    if !(1..i64::MAX).contains(&step) {
                        let (of, field, help) = (NAME, "a saved step", "it must be 1 or more");
                        return Err(Error::InvalidConfig { of, field, got: step as f64, help });
                    }
                    let mut buffer = |field| {
                        let tensor = reader.required(name, field, var.dims(), state_dtype(var))?;
                        Result::Ok(Buffer::from_tensor(tensor, var)?)
                    };
                    let (of_gradients, of_squares) = (buffer("exp_avg")?, buffer("exp_avg_sq")?);
                    Some(AdamState { step, of_gradients, of_squares })
                }
            };
            all.push((low, means));
        }
        reader.finish()?;
        for (slot, (low, means)) in self.slots.iter_mut().zip(all) {
            (slot.low, slot.state) = (low, means);
        }
        Ok(())
    }
}
