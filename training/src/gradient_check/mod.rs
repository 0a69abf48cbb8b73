//! Checks the gradients of backward by forward passes with changed parameters: what an operation without backward has lost, or
//! a wrong one has made up, shows as a difference, whatever candle's graph says.

mod changes;
mod search;

use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use ops::Precision;
use ops::kernels::warn;

use crate::audit::is_frozen;
use crate::{Error, GradientCheck, OnMissingGradient, Result};

pub use changes::KeptVars;
use search::Search;

/// How gradients are checked, and what to do about those that are wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientCheckConfig {
    /// What to do if backward has lost a part of a gradient. Default: an error.
    pub on_lost: OnMissingGradient,
    /// Maximum number of forward passes. With fewer passes than about 4 per parameter, parameters are checked in groups. A
    /// gradient that is wrong takes more passes, to find its place. Default: 64.
    pub forward_passes: usize,
    /// Names, or name prefixes that end at a dot, of parameters that are not checked, because they are frozen or their
    /// gradient is stopped on purpose: "encoder" also covers "encoder.weight". Default: none.
    pub frozen: Vec<String>,
}

impl Default for GradientCheckConfig {
    fn default() -> Self {
        Self { on_lost: OnMissingGradient::Fail, forward_passes: 64, frozen: Vec::new() }
    }
}

impl GradientCheckConfig {
    /// Whether a parameter is not to be checked.
    pub fn is_frozen(&self, name: &str) -> bool {
        is_frozen(&self.frozen, name)
    }

    /// Acts on a result: only the rank with `is_speaker` warns, but every rank fails.
    ///
    /// # Errors
    /// [`Error::LostGradients`], with [`OnMissingGradient::Fail`].
    pub fn act(&self, is_speaker: bool, check: GradientCheck) -> Result<()> {
        if check.lost.is_empty() {
            return Ok(());
        }
        if self.on_lost == OnMissingGradient::Fail {
            return Err(Error::LostGradients { check });
        }
        if is_speaker && self.on_lost == OnMissingGradient::Warn {
            warn(&check.to_string());
        }
        Ok(())
    }
}

/// A loss as a function of parameters that are changed in between; on several ranks, the same number on each.
pub trait CheckedLoss {
    /// The caller's error.
    type Error: From<Error>;

    /// Computes the loss with the parameters' present values, by a forward pass with the same data and the same random numbers
    /// each time.
    ///
    /// # Errors
    /// Any; the parameters are then as they were.
    fn loss(&mut self) -> std::result::Result<f64, Self::Error>;

    /// Replaces each number by its sum over the ranks that hold different parts of the parameters.
    ///
    /// # Errors
    /// Any; the parameters are then as they were.
    fn sum(&mut self, numbers: &mut [f64]) -> std::result::Result<(), Self::Error> {
        let _ = numbers;
        Ok(())
    }

    /// Variables that a forward pass changes, such as running statistics; they get their values back. By default none.
    fn state(&self) -> Vec<Var> {
        Vec::new()
    }

    /// Relative rounding error of the loss. By default that of f32.
    fn rounding(&self) -> f64 {
        f64::from(f32::EPSILON)
    }
}

/// What a rank holds of a parameter.
#[derive(Debug)]
pub struct CheckedPart {
    /// Index of the parameter in the list of all of them.
    pub parameter: usize,
    /// The rank's variable, of f32 or f64.
    pub var: Var,
    /// Its gradient.
    pub gradient: Option<Tensor>,
    /// Which elements of the whole parameter, flattened, it starts with, in their order; the rest is padding.
    pub elements: Vec<Range<usize>>,
    /// Whether this rank contributes it to sums over ranks: of equal parts, one rank.
    pub counts: bool,
}

/// Checks the gradients of `loss` by forward passes in which parameters are changed, and returns those that are wrong.
///
/// Needed, since candle has operations that leave nothing in its graph: with one projection for queries, keys and values and
/// `candle_nn::ops::softmax_last_dim`, the gradient of queries and keys is zero, and every parameter has one. For each
/// parameter, and first of all for the rows whose gradient is exactly zero, the change of the loss along a random direction is
/// compared with what the gradient says. A gradient that is rightly zero (of words that did not occur, of units that are off)
/// agrees. What is wrong is searched by halves: which parameters, and which of their rows.
///
/// `loss` must compute the same with the same parameters: with dropout, derive the masks from a key
/// ([`RowKeys`](ops::RowKeys)), or leave it out. Its products are in f32 here. Parameters of 16 bits are too coarse to be
/// checked; they are in [`GradientCheck::undecided`], as are parameters whose influence is smaller than the loss's rounding.
/// Leave variables that are frozen on purpose out of `vars`, or name them in the configuration. All variables of `vars` are
/// afterwards as before, to the bit, also after an error, including running statistics that forward has changed.
///
/// Acts on what it finds as configured: by default it fails. For one process; `Parallel::check_gradient` checks a model in any
/// layout.
///
/// # Cost
/// One backward and at most [`GradientCheckConfig::forward_passes`] forward passes, usually 2 to 6 per parameter; more only to
/// find the place of what is wrong. Memory for a copy of the variables.
///
/// # Errors
/// [`Error::LostGradients`]; [`Error::NotRepeatable`] if two passes differ; errors of forward and backward.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use training::{GradientCheckConfig, check_gradient, named_vars};
///
/// let vars = VarMap::new();
/// let qkv = candle_nn::linear_no_bias(8, 24, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("qkv"))?;
/// let x = Tensor::randn(0f32, 1.0, (6, 8), &Device::Cpu)?;
/// let attention = |softmax: fn(&Tensor) -> candle_core::Result<Tensor>| {
///     let qkv = qkv.forward(&x)?;
///     let [q, k, v] = [0, 8, 16].map(|begin| qkv.narrow(1, begin, 8)?.contiguous());
///     softmax(&q?.matmul(&k?.t()?)?)?.matmul(&v?)?.sqr()?.mean_all()
/// };
/// let (named, config) = (named_vars(&vars), GradientCheckConfig::default());
/// let lost = check_gradient(|| attention(candle_nn::ops::softmax_last_dim), &named, &config).unwrap_err();
/// assert!(lost.to_string().contains("qkv.weight, rows 0 to 15"), "{lost}");
/// check_gradient(|| attention(ops::softmax), &named, &config)?;
/// # Ok::<(), training::Error>(())
/// ```
pub fn check_gradient(
    loss: impl FnMut() -> candle_core::Result<Tensor>,
    vars: &[(String, Var)],
    config: &GradientCheckConfig,
) -> Result<GradientCheck> {
    Precision::F32.scope(|| {
        let _kept = KeptVars::of(vars.iter().map(|(_, var)| var))?;
        let mut alone = Alone { loss, rounding: f64::from(f32::EPSILON) };
        let first = (alone.loss)()?;
        if first.dtype() == DType::F64 {
            alone.rounding = f64::EPSILON;
        }
        let grads = ops::backward(&first)?;
        drop(first);
        let looked_at =
            || vars.iter().filter(|(name, var)| var.dtype().is_float() && !config.is_frozen(name));
        let wholes: Vec<_> = looked_at().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect();
        let part = |(parameter, (_, var)): (usize, &(String, Var))| whole_part(parameter, var, &grads);
        let parts = looked_at().enumerate().map(part).collect();
        let check = check_gradient_of(&mut alone, &wholes, parts, config)?;
        config.act(true, check.clone())?;
        Ok(check)
    })
}

/// A parameter that this process has all of.
fn whole_part(parameter: usize, var: &Var, grads: &GradStore) -> CheckedPart {
    let elements = std::iter::once(0..var.elem_count()).collect();
    CheckedPart { parameter, var: var.clone(), gradient: grads.get(var).cloned(), elements, counts: true }
}

/// Checks gradients as [`check_gradient`] does, of a loss of several ranks; each calls it with the same parameters, given as name
/// and shape, and with the parts that it holds. All ranks get the same result. It is the caller's to act on.
///
/// # Errors
/// [`Error::NotRepeatable`]; errors of the loss.
pub fn check_gradient_of<L: CheckedLoss>(
    loss: &mut L,
    parameters: &[(String, Vec<usize>)],
    parts: Vec<CheckedPart>,
    config: &GradientCheckConfig,
) -> std::result::Result<GradientCheck, L::Error> {
    let _kept = KeptVars::of(&loss.state()).map_err(Error::from)?;
    Search::begin(loss, parameters, parts, config.forward_passes)?.run()
}

/// The loss of one process.
struct Alone<F> {
    loss: F,
    rounding: f64,
}

impl<F: FnMut() -> candle_core::Result<Tensor>> CheckedLoss for Alone<F> {
    type Error = Error;

    fn loss(&mut self) -> Result<f64> {
        Ok((self.loss)()?.to_dtype(DType::F64)?.to_scalar::<f64>()?)
    }

    fn rounding(&self) -> f64 {
        self.rounding
    }
}
