//! Muon: matrices of hidden layers step in orthogonal directions, everything else by AdamW.

mod newton_schulz;

use std::collections::{HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{Result as CandleResult, Tensor, Var};
use candle_nn::Optimizer;

use self::newton_schulz::orthogonal;
use crate::low_bits::LOW_BITS;
use crate::sgd::step_plain;
use crate::slot::{Reader, Slot, check_scale, named_by_index, slots};
use crate::state::{DeferredCopy, state_dtype};
use crate::{Adam, AdamConfig, Error, HeldWhole, OptimizerState, Result, StepOptimizer, WholeMatrices};

const NAME: &str = "Muon";
/// PyTorch's name of the mean.
const MOMENTUM: &str = "momentum_buffer";

/// How the learning rate of a matrix of `rows` and `columns` depends on its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdjustRate {
    /// Times `sqrt(max(1, rows / columns))`: PyTorch's `original`.
    #[default]
    Original,
    /// Times `0.2 sqrt(max(rows, columns))`: steps are as long as AdamW's usually are, so that its learning rate and weight decay
    /// fit. PyTorch's `match_rms_adamw`.
    MatchRmsAdamW,
    /// Times `sqrt(rows / columns)`, also below 1: steps change the largest output of an input alike, whatever the shape. PyTorch's
    /// `spectral_unclamped`.
    SpectralUnclamped,
}

impl AdjustRate {
    fn factor(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            Self::Original => (rows / columns).max(1.).sqrt(),
            Self::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
            Self::SpectralUnclamped => (rows / columns).sqrt(),
        }
    }
}

/// Hyperparameters of [`Muon`]. The defaults are those of PyTorch's `Muon`, and of its `AdamW` for the rest.
#[derive(Debug, Clone, PartialEq)]
pub struct MuonConfig {
    /// Learning rate of the matrices, above 0. Default 0.001.
    pub learning_rate: f64,
    /// Decay rate of the mean of the gradients, 0 to 1 (exclusive). Default 0.95.
    pub momentum: f64,
    /// Whether a direction is made of the gradient and the mean, and not of the mean alone. Default true.
    pub nesterov: bool,
    /// Weight decay of the matrices, applied to them directly, 0 or more. Default 0.1.
    pub weight_decay: f64,
    /// How the learning rate depends on a matrix's shape.
    pub adjust: AdjustRate,
    /// Iterations of Newton-Schulz. Default 5.
    pub iterations: usize,
    /// Smallest norm that a matrix is divided by, 0 or more. Default 1e-7.
    pub eps: f64,
    /// For all other parameters, with its own learning rate: their ratio stays when that of the matrices is set.
    pub adam: AdamConfig,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            adjust: AdjustRate::Original,
            iterations: 5,
            eps: 1e-7,
            adam: AdamConfig::adamw(),
        }
    }
}

impl MuonConfig {
    /// Checks that every field is in its range.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
    pub fn validate(&self) -> Result<()> {
        let invalid = |field, got, help| Err(Error::InvalidConfig { of: NAME, field, got, help });
        for (field, got) in
            [("learning_rate", self.learning_rate), ("eps", self.eps), ("weight_decay", self.weight_decay)]
        {
            if !(got.is_finite() && got >= 0.) {
                return invalid(field, got, "it must be a finite number, 0 or more");
            }
        }
        if !(0. ..1.).contains(&self.momentum) {
            return invalid("momentum", self.momentum, "it must be a number from 0 to 1, but not 1");
        }
        if !(1..100).contains(&self.iterations) {
            return invalid("iterations", self.iterations as f64, "it must be from 1 to 99");
        }
        self.adam.validate()
    }
}

/// Muon: a matrix steps along the mean of its past gradients, made orthogonal.
///
/// With gradient g, mean m and matrix p, as in PyTorch: `m += (1 - momentum) (g - m)`; with `nesterov` `d = g + momentum (m - g)`,
/// otherwise `d = m`; `p -= learning_rate * weight_decay * p`; `p -= learning_rate * adjusted * orthogonal(d)`, where
/// `orthogonal` brings all singular values of d near 1, by iterations of `x = a x + (b x x^T + c (x x^T)^2) x` (Newton-Schulz).
/// A parameter with more than two dimensions is several matrices, such as those of experts. PyTorch computes the iterations in
/// bf16; here they are in f32, or f64 for parameters of f64.
///
/// Only parameters that [`named`](Self::named) is told to step so are, the others by AdamW ([`MuonConfig::adam`]). Muon is for
/// matrices of hidden layers: not for embeddings, the head, norms and biases.
///
/// [`step_scaled`](Self::step_scaled) is for a process that holds the matrices whole. Where ranks hold parts of them, give
/// [`step_whole`](StepOptimizer::step_whole) a [`WholeMatrices`] that brings them together: part by part the result would be another.
///
/// # Cost
/// About `iterations * (4 m^2 n + 2 m^3)` operations for a matrix whose sides are m and n, of which m is the shorter. Memory for one copy of
/// the matrices, and during a step another.
///
/// # Source
/// Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is scalable for LLM
/// training" (2025) for [`AdjustRate::MatchRmsAdamW`].
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_nn::Optimizer;
/// use training::{Muon, MuonConfig};
///
/// let (weight, bias) = (Var::new(&[[1f64, 2.], [3., 4.]], &Device::Cpu)?, Var::new(&[1f64, 2.], &Device::Cpu)?);
/// let named = [("fc.weight".into(), weight.clone()), ("fc.bias".into(), bias.clone())];
/// let mut muon = Muon::named(named, |name| name.ends_with("weight"), MuonConfig::default())?;
/// muon.backward_step(&(weight.as_tensor().sqr()?.sum_all()? + bias.as_tensor().sum_all()?)?)?;
/// assert_eq!(muon.matrices().collect::<Vec<_>>(), ["fc.weight"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Muon {
    config: MuonConfig,
    /// A slot's state is the mean of its parameter's gradients. A step replaces the tensor.
    slots: Vec<Slot<Tensor>>,
    rest: Adam,
    /// The learning rate of the rest, divided by that of the matrices.
    ratio: f64,
}

impl Muon {
    /// Creates an optimizer of named parameters; the names are the keys of its saved state. Those for whose names `is_hidden`
    /// returns true must be matrices, and are stepped as such, the others by AdamW. Variables of non-float dtypes are ignored.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::DuplicateName`], [`Error::DuplicateVariable`].
    pub fn named(
        vars: impl IntoIterator<Item = (String, Var)>,
        is_hidden: impl Fn(&str) -> bool,
        config: MuonConfig,
    ) -> Result<Self> {
        config.validate()?;
        if config.learning_rate == 0. {
            let help = "it must be above 0: the other learning rate is a multiple of it";
            return Err(Error::InvalidConfig { of: NAME, field: "learning_rate", got: 0., help });
        }
        let all = slots::<Tensor>(NAME, vars)?;
        let (slots, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|slot| is_hidden(&slot.name));
        let rest = Adam::named(rest.into_iter().map(|slot| (slot.name, slot.var)), config.adam.clone())?;
        let ratio = config.adam.learning_rate / config.learning_rate;
        Ok(Self { config, slots, rest, ratio })
    }

    /// Limits AdamW's weight decay to the parameters for whose names `decays` returns true.
    #[must_use]
    pub fn decaying(mut self, decays: impl Fn(&str) -> bool) -> Self {
        self.rest = self.rest.decaying(decays);
        self
    }

    /// Names of the parameters that are stepped as matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &str> {
        self.slots.iter().map(|slot| &*slot.name)
    }

    /// Current hyperparameters.
    pub fn config(&self) -> &MuonConfig {
        &self.config
    }

    /// Steps with gradients multiplied by `scale`, in a process that holds all matrices whole.
    ///
    /// # Errors
    /// A gradient that does not fit its parameter; a parameter that is no matrix; no matrix at all; [`Error::InvalidConfig`].
    pub fn step_scaled(&mut self, grads: &GradStore, scale: f64) -> CandleResult<()> {
        self.step_whole(grads, scale, &mut HeldWhole)
    }
}

/// The weighted mean: all of `a` with 0, all of `b` with 1.
fn lerp(a: &Tensor, b: &Tensor, weight: f64) -> CandleResult<Tensor> {
    a.affine(1. - weight, 0.)? + b.affine(weight, 0.)?
}

/// The next mean of a parameter's gradients, and its direction.
fn mean_and_direction(
    Slot { var, state, .. }: &Slot<Tensor>,
    grad: &Tensor,
    config: &MuonConfig,
    scale: f64,
) -> CandleResult<(Tensor, Tensor)> {
    let grad = grad.detach().to_dtype(state_dtype(var))?.affine(scale, 0.)?.contiguous()?;
    let mean = match state {
        Some(mean) => lerp(mean, &grad, 1. - config.momentum)?,
        None => grad.affine(1. - config.momentum, 0.)?,
    };
    let direction = if config.nesterov { lerp(&grad, &mean, config.momentum)? } else { mean.clone() };
    Ok((mean, direction))
}

impl StepOptimizer for Muon {
    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.config.learning_rate = learning_rate;
        Optimizer::set_learning_rate(&mut self.rest, learning_rate * self.ratio);
    }

    fn step_whole(
        &mut self,
        grads: &GradStore,
        scale: f64,
        matrices: &mut dyn WholeMatrices,
    ) -> CandleResult<()> {
        self.config.validate()?;
        check_scale(NAME, scale)?;
        let (slots, config) = (&self.slots, &self.config);
        for slot in slots {
            grads.get(&slot.var).map_or(Ok(()), |grad| slot.check(NAME, grad))?;
        }
        self.rest.check(grads, scale)?;
        let names: Vec<&str> = slots.iter().map(|slot| &*slot.name).collect();
        // Without a gradient here the others may have one: their matrix has zeros in this part.
        let part = |place: usize| match grads.get(&slots[place].var) {
            Some(grad) => Ok(mean_and_direction(&slots[place], grad, config, scale)?.1),
            None => slots[place].var.zeros_like()?.to_dtype(state_dtype(&slots[place].var)),
        };
        let compute = |whole: &Tensor| {
            let (rows, columns) = whole.dims2()?;
            orthogonal(whole, config.iterations, config.eps)? * config.adjust.factor(rows, columns)
        };
        let directions = matrices.map(&names, &part, &compute)?;
        // All communication is done: from here on the step is complete on this rank.
        for (slot, direction) in self.slots.iter_mut().zip(directions) {
            let Some(grad) = grads.get(&slot.var) else { continue };
            slot.state = Some(mean_and_direction(slot, grad, &self.config, scale)?.0);
            step_plain(
                &slot.var,
                &mut slot.low,
                &direction,
                [self.config.learning_rate, self.config.weight_decay],
            )?;
        }
        self.rest.step_scaled(grads, scale)
    }
}

impl Optimizer for Muon {
    type Config = MuonConfig;

    /// Takes the float variables of `vars`, those with two dimensions or more as matrices: for the hidden layers of a model. The
    /// others cannot be trained and are ignored.
    fn new(vars: Vec<Var>, config: MuonConfig) -> CandleResult<Self> {
        let is_matrix: Vec<bool> = vars.iter().map(|var| var.rank() > 1).collect();
        let is_hidden = |name: &str| name.parse().is_ok_and(|place: usize| is_matrix[place]);
        Ok(Self::named(named_by_index(vars), is_hidden, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> CandleResult<()> {
        self.step_scaled(grads, 1.)
    }

    fn learning_rate(&self) -> f64 {
        self.config.learning_rate
    }

    fn set_learning_rate(&mut self, lr: f64) {
        StepOptimizer::set_learning_rate(self, lr);
    }
}

impl OptimizerState for Muon {
    fn state_later(&self) -> Result<Vec<(String, DeferredCopy)>> {
        let mut entries = vec![];
        for Slot { name, var, low, state } in &self.slots {
            let mean = state.clone().map(DeferredCopy::new);
            entries.extend(mean.map(|mean| (format!("{name}.{MOMENTUM}"), mean)));
            let low = low.to_tensor_later(var)?;
            entries.extend(low.map(|low| (format!("{name}.{LOW_BITS}"), low)));
        }
        entries.extend(self.rest.state_later()?);
        Ok(entries)
    }

    fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        let names: HashSet<&str> = self.matrices().collect();
        // The field is what follows the last dot: names may be the beginnings of others.
        let is_own = |key: &str| key.rsplit_once('.').is_some_and(|(parameter, _)| names.contains(parameter));
        let (own, rest): (HashMap<_, _>, HashMap<_, _>) =
            state.iter().map(|(key, tensor)| (key.clone(), tensor.clone())).partition(|(key, _)| is_own(key));
        let mut reader = Reader::new(NAME, &own);
        let mut all = vec![];
        for Slot { name, var, .. } in &self.slots {
            let mean = reader.optional(name, MOMENTUM, var.dims(), state_dtype(var))?;
            let mean =
                mean.map(|mean| mean.detach().to_device(var.device())?.force_contiguous()).transpose()?;
            all.push((reader.low_bits(name, var)?, mean));
        }
        reader.finish()?;
        self.rest.load_state(&rest)?;
        for (slot, (low, mean)) in self.slots.iter_mut().zip(all) {
            (slot.low, slot.state) = (low, mean);
        }
        Ok(())
    }
}
