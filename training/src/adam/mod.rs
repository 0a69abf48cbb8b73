//! Adam and AdamW, by PyTorch's formulas.

mod fallback;
mod host;

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;

use crate::state::{Buffer, CopyLater, Reader, Slot, check_scale, numbered, slots, wide};
use crate::{Error, OptimizerState, Result};

const NAME: &str = "Adam";

/// How [`Adam`] steps. The default is PyTorch's `Adam`, [`AdamConfig::adamw`] its `AdamW`.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamConfig {
    /// Step size, 0 or more. Default 0.001.
    pub learning_rate: f64,
    /// How much of the mean of the gradients is kept at each step, 0 to 1 (exclusive). Default 0.9.
    pub beta1: f64,
    /// How much of the mean of their squares is kept at each step, 0 to 1 (exclusive). Default 0.999.
    pub beta2: f64,
    /// What is added to the root that is divided by, 0 or more. Default 1e-8.
    pub eps: f64,
    /// Strength of the pull to zero, 0 or more. Default 0; AdamW's is 0.01.
    pub weight_decay: f64,
    /// Whether the pull acts on the parameter by itself (AdamW) or as a part of the gradient (L2 penalty). Default false.
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

    /// Says which field cannot be used, if one cannot.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`]: a value that is not finite or negative, a beta of 1 or more.
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

/// Adam, or AdamW: steps along the mean of past gradients, scaled by the root of the mean of their squares.
///
/// With gradient g, parameter p, means m and v, at a parameter's step t, as in PyTorch:
/// `g += weight_decay * p`, or decoupled `p -= learning_rate * weight_decay * p`; `m += (1 - beta1) (g - m)`;
/// `v = beta2 * v + (1 - beta2) g^2`; `p -= learning_rate / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)`.
/// A parameter without a gradient is left alone, and its t does not count on.
///
/// On a CPU, f32 and f64 parameters are updated in place in one pass, in parallel; the bits do not depend on the number of threads. Elsewhere, and for f16 and bf16,
/// candle's tensor operations do it; the two half types are computed in f32 and keep f32 means.
///
/// # Cost
/// Two copies of the parameters.
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
    slots: Vec<Slot<Means>>,
    /// Of each slot, whether its parameter decays.
    decays: Vec<bool>,
}

/// What is remembered of a parameter.
#[derive(Debug)]
struct Means {
    step: i64,
    of_gradients: Buffer,
    of_squares: Buffer,
}

/// The numbers of one step, the same for all elements of a parameter.
#[derive(Debug, Clone, Copy)]
struct Factors {
    /// What the gradient is multiplied with first.
    scale: f64,
    /// What the gradient is increased by for each unit of the parameter.
    penalty: f64,
    /// What the parameter is multiplied with first.
    shrink: f64,
    beta1: f64,
    beta2: f64,
    /// Minus the step size, corrected for the short past of the mean.
    rate: f64,
    /// The root of the correction of the mean of squares.
    root: f64,
    eps: f64,
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
            beta2: self.beta2,
            rate: -self.learning_rate / correction(self.beta1),
            root: correction(self.beta2).sqrt(),
            eps: self.eps,
        }
    }
}

impl Adam {
    /// An optimizer of parameters with names, by which its state is saved. Variables that are not float are left out.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::SameName`].
    pub fn named(vars: impl IntoIterator<Item = (String, Var)>, config: AdamConfig) -> Result<Self> {
        config.validate()?;
        let slots = slots(NAME, vars)?;
        Ok(Self { config, decays: vec![true; slots.len()], slots })
    }

    /// From now on only those parameters decay whose names `decays` is true for: usually weights of layers, and neither biases nor norms.
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

    /// Bytes of what it remembers.
    pub fn state_bytes(&self) -> usize {
        let of = |slot: &Slot<Means>| slot.var.elem_count() * wide(&slot.var).size_in_bytes() * 2;
        self.slots.iter().filter(|slot| slot.state.is_some()).map(of).sum()
    }

    /// How it steps now.
    pub fn config(&self) -> &AdamConfig {
        &self.config
    }

    /// A step with gradients that are multiplied with `scale` on the way: equal to the bit to
    /// [`scale_grads`](crate::scale_grads) and a step, without the pass over the gradients that scaling is. For clipping
    /// ([`clip_factor`](crate::clip_factor)). Gradients of f16 and bf16 are scaled in f32, and not rounded in between.
    ///
    /// # Errors
    /// A gradient that does not fit its parameter; [`Error::InvalidConfig`] for a `scale` or learning rate that is not finite.
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
        // `set_learning_rate` cannot refuse a value, so it is looked at here.
        self.config.validate()?;
        check_scale(NAME, scale)?;
        for (slot, decays) in self.slots.iter_mut().zip(&self.decays) {
            let Some(grad) = grads.get(&slot.var) else { continue };
            slot.check(NAME, grad)?;
            let on_host = slot.on_host();
            let means = match &mut slot.state {
                Some(means) => means,
                none => none.insert(Means {
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
                host::step(&slot.var, grad, means, factors)?;
            } else {
                fallback::step(&slot.var, grad, means, factors)?;
            }
            means.step += 1;
        }
        Ok(())
    }
}

impl Optimizer for Adam {
    type Config = AdamConfig;

    /// Takes the float variables of `vars`; others cannot be trained, and are left out.
    fn new(vars: Vec<Var>, config: AdamConfig) -> candle_core::Result<Self> {
        Ok(Self::named(numbered(vars), config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        self.step_scaled(grads, 1.)
    }

    fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.config.learning_rate = lr;
    }
}

impl OptimizerState for Adam {
    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut entries = vec![];
        for Slot { name, var, state } in &self.slots {
            if let Some(means) = state {
                entries.push((format!("{name}.step"), Tensor::new(means.step, &Device::Cpu)?));
                entries.push((format!("{name}.exp_avg"), means.of_gradients.to_tensor(var)?));
                entries.push((format!("{name}.exp_avg_sq"), means.of_squares.to_tensor(var)?));
            }
        }
        Ok(entries)
    }

    fn state_later(&self) -> Result<Vec<(String, CopyLater)>> {
        let mut entries = vec![];
        for Slot { name, var, state } in &self.slots {
            if let Some(means) = state {
                let step = Tensor::new(means.step, &Device::Cpu)?;
                entries.push((format!("{name}.step"), CopyLater::done(step)));
                entries.push((format!("{name}.exp_avg"), means.of_gradients.to_tensor_later(var)?));
                entries.push((format!("{name}.exp_avg_sq"), means.of_squares.to_tensor_later(var)?));
            }
        }
        Ok(entries)
    }

    fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let mut reader = Reader::new(NAME, state);
        let mut all = vec![];
        for Slot { name, var, .. } in &self.slots {
            all.push(match reader.optional(name, "step", &[], DType::I64)? {
                None => None,
                Some(step) => {
                    let mut buffer = |field| {
                        let tensor = reader.required(name, field, var.dims(), wide(var))?;
                        Result::Ok(Buffer::from_tensor(tensor, var)?)
                    };
                    let (of_gradients, of_squares) = (buffer("exp_avg")?, buffer("exp_avg_sq")?);
                    Some(Means { step: step.to_scalar::<i64>()?, of_gradients, of_squares })
                }
            });
        }
        reader.finish()?;
        for (slot, means) in self.slots.iter_mut().zip(all) {
            slot.state = means;
        }
        Ok(())
    }
}
