//! Audit: which parameters get no gradient, and the likely reason.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;

use candle_core::{Tensor, TensorId, Var};

use crate::{Error, Result};

/// Maximum number of names listed in a message.
const NAMES: usize = 5;

/// What a strategy does when parameters have no gradient on any rank after the first backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnMissingGradient {
    /// Warns once, through `tracing`, on the group's first rank.
    #[default]
    Warn,
    /// Fails with [`Error::MissingGradients`], on every rank.
    Fail,
    /// Does nothing.
    Ignore,
}

/// How a strategy checks for parameters without a gradient, in the first backward that has data.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditConfig {
    /// What to do about them. Default: a warning.
    pub on_missing: OnMissingGradient,
    /// Names, or name prefixes that end at a dot, of parameters that are frozen on purpose and not checked: "encoder"
    /// also covers "encoder.weight". Default: none.
    pub frozen: Vec<String>,
}

impl AuditConfig {
    /// Checks parameters, given as name, shape and whether there is a gradient, and acts on the result as configured.
    /// `strategy` appears in the message; only the rank with `is_speaker` warns, but every rank fails.
    ///
    /// # Errors
    /// [`Error::MissingGradients`], with [`OnMissingGradient::Fail`].
    ///
    /// ```
    /// use training::{AuditConfig, OnMissingGradient};
    ///
    /// let parameters = [("a.weight", &[2, 2][..], true), ("b.weight", &[2, 2], false)];
    /// let strict = AuditConfig { on_missing: OnMissingGradient::Fail, ..AuditConfig::default() };
    /// assert!(strict.act("Ddp", true, parameters).is_err());
    /// let frozen = AuditConfig { frozen: vec!["b".into()], ..strict };
    /// assert!(frozen.act("Ddp", true, parameters).is_ok());
    /// ```
    pub fn act<'a>(
        &self,
        strategy: &'static str,
        is_speaker: bool,
        parameters: impl IntoIterator<Item = (&'a str, &'a [usize], bool)>,
    ) -> Result<()> {
        if self.on_missing == OnMissingGradient::Ignore {
            return Ok(());
        }
        let looked_at = parameters.into_iter().filter(|(name, ..)| !self.is_frozen(name));
        let audit = GradientAudit::new(looked_at);
        if audit.missing().is_empty() {
            return Ok(());
        }
        match self.on_missing {
            OnMissingGradient::Fail => Err(Error::MissingGradients { strategy, audit }),
            _ => {
                if is_speaker {
                    warn(&format!("{strategy}: after the first backward, all ranks together, {audit}"));
                }
                Ok(())
            }
        }
    }

    fn is_frozen(&self, name: &str) -> bool {
        let is_below = |rest: &str| rest.is_empty() || rest.starts_with('.');
        self.frozen.iter().any(|frozen| name.strip_prefix(frozen.as_str()).is_some_and(is_below))
    }
}

/// Warns through `tracing`, or on standard error where no subscriber takes warnings, since it is reported only once.
fn warn(text: &str) {
    match tracing::enabled!(tracing::Level::WARN) {
        true => tracing::warn!("{text}"),
        false => eprintln!("warning: {text}"),
    }
}

/// Why a parameter has no gradient, as far as can be determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoGradient {
    /// The graph of the loss does not lead to it. It was not used, or only detached, or an operation without backward
    /// lies between it and the loss: candle's graph does not show which.
    NotReached,
    /// As `NotReached`; its name and shape suggest that this candle operation, which has no backward, uses it. A
    /// guess.
    Likely(&'static str),
    /// The graph leads to it, but the operation that takes it returned no gradient. (Where a later operation returns
    /// none, candle's backward panics.)
    NotGiven,
}

/// The parameters that have no gradient, among those checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GradientAudit {
    missing: Vec<(String, NoGradient)>,
    total: usize,
}

/// Returns which of these variables get no gradient from `loss`, with the likely reason.
///
/// In candle 0.11 gradients stop silently at the following operations, since they leave nothing in the graph; the
/// replacement is in brackets: `softmax_last_dim` ([`softmax`](crate::softmax)), `layer_norm`
/// ([`LayerNorm`](crate::LayerNorm)), `rms_norm` ([`RmsNorm`](crate::RmsNorm)), `rope`, `rope_i` and `rope_thd`
/// ([`Rotary`](crate::Rotary)), `sdpa` ([`attention`](crate::attention)), and products with quantised weights.
/// `candle_nn::LayerNorm` and `candle_nn::RmsNorm` call some of these. As the graph does not show them, the operation
/// named is a guess from the parameter's name and shape.
///
/// Leave variables that are frozen on purpose out of `vars`. For one process; the strategies check by themselves
/// ([`AuditConfig`]).
///
/// # Cost
/// A backward pass.
///
/// # Errors
/// Errors of backward; candle's message names the operation that refuses it.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use training::{NoGradient, audit, named_vars};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let (first, last) = (candle_nn::linear_no_bias(4, 4, builder.pp("a"))?, candle_nn::linear_no_bias(4, 2, builder.pp("b"))?);
/// let norm = candle_nn::rms_norm(4, 1e-6, builder.pp("norm"))?;
/// let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
/// let loss = last.forward(&norm.forward(&first.forward(&x)?)?)?.sum_all()?;
/// let found = audit(&loss, &named_vars(&vars))?;
/// let expected = [("a.weight".into(), NoGradient::NotReached), ("norm.weight".into(), NoGradient::Likely("rms_norm"))];
/// assert_eq!(found.missing(), expected);
/// assert!(found.to_string().starts_with("2 of 3 parameters have no gradient: a.weight, norm.weight;"));
/// # Ok::<(), training::Error>(())
/// ```
pub fn audit(loss: &Tensor, vars: &[(String, Var)]) -> Result<GradientAudit> {
    let reached: HashSet<TensorId> = loss.sorted_nodes().iter().map(|node| node.id()).collect();
    let grads = crate::backward(loss)?;
    let floats = || vars.iter().filter(|(_, var)| var.dtype().is_float());
    let seen = floats().map(|(name, var)| (name.as_str(), var.dims(), grads.get(var).is_some()));
    let mut audit = GradientAudit::new(seen);
    let given: HashMap<&str, &Var> = floats().map(|(name, var)| (name.as_str(), var)).collect();
    for (name, reason) in &mut audit.missing {
        if given.get(name.as_str()).is_some_and(|var| reached.contains(&var.id())) {
            *reason = NoGradient::NotGiven;
        }
    }
    Ok(audit)
}

impl GradientAudit {
    fn new<'a>(parameters: impl IntoIterator<Item = (&'a str, &'a [usize], bool)>) -> Self {
        let all: Vec<_> = parameters.into_iter().collect();
        let known: HashMap<&str, bool> = all.iter().map(|&(name, _, has)| (name, has)).collect();
        let missing = all.iter().filter(|(.., has)| !has);
        let reason =
            |name, dims| likely(name, dims, &known).map_or(NoGradient::NotReached, NoGradient::Likely);
        Self {
            missing: missing.map(|&(name, dims, _)| (name.to_owned(), reason(name, dims))).collect(),
            total: all.len(),
        }
    }

    /// The parameters without a gradient, in the order given.
    pub fn missing(&self) -> &[(String, NoGradient)] {
        &self.missing
    }
}

impl fmt::Display for GradientAudit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { missing, total } = self;
        let names: Vec<&str> = missing.iter().take(NAMES).map(|(name, _)| name.as_str()).collect();
        write!(f, "{} of {total} parameters have no gradient: {}", missing.len(), names.join(", "))?;
        if missing.len() > NAMES {
            write!(f, " and {} more", missing.len() - NAMES)?;
        }
        if missing.iter().any(|(_, reason)| *reason != NoGradient::NotGiven) {
            write!(
                f,
                "; the graph of the loss does not lead to them: they are not used, or only detached, or an operation without backward \
                 is between"
            )?;
        }
        if missing.iter().all(|(_, reason)| *reason == NoGradient::NotReached) {
            write!(f, ", such as candle's sdpa, rope or product with quantised weights")?;
        }
        let mut named = BTreeSet::new();
        for (name, reason) in missing {
            if let NoGradient::Likely(operation) = reason
                && named.insert(*operation)
            {
                let instead = instead(operation);
                write!(f, "; likely candle's {operation}, at {name}, has none: use {instead}")?;
            }
        }
        if let Some((name, _)) = missing.iter().find(|(_, reason)| *reason == NoGradient::NotGiven) {
            write!(f, "; an operation between {name} and the loss gave no gradient")?;
        }
        Ok(())
    }
}

const QUERY_OR_KEY: [&str; 10] = ["q_proj", "k_proj", "query", "key", "to_q", "to_k", "wq", "wk", "q", "k"];
const VALUE: [&str; 5] = ["v_proj", "value", "to_v", "wv", "v"];
const OUTPUT: [&str; 7] = ["o_proj", "out_proj", "c_proj", "to_out", "wo", "o", "out"];
const WEIGHTS: &str = "softmax_last_dim or rope";
const WHOLE: &str = "sdpa";

/// Replacement for a candle operation without backward.
fn instead(operation: &str) -> &'static str {
    match operation {
        "rms_norm" => "training::RmsNorm",
        "layer_norm" => "training::LayerNorm",
        WHOLE => "training::attention",
        _ => "training::attention, or training::softmax and training::Rotary",
    }
}

/// The candle operation without backward that most likely uses this parameter.
fn likely(name: &str, dims: &[usize], has_gradient: &HashMap<&str, bool>) -> Option<&'static str> {
    let (module, _) = name.rsplit_once('.')?;
    let (parent, own) = module.rsplit_once('.').unwrap_or(("", module));
    if dims.len() == 1 && (own.contains("norm") || own.starts_with("ln")) {
        let has_bias = ["bias", "beta"]
            .iter()
            .any(|last| has_gradient.contains_key(format!("{module}.{last}").as_str()));
        return Some(if has_bias { "layer_norm" } else { "rms_norm" });
    }
    let has_sibling = |names: &[&str]| {
        let is_one = |(name, has): (&&str, &bool)| {
            let of_parent = match parent {
                "" => Some(*name),
                parent => name.strip_prefix(parent).and_then(|rest| rest.strip_prefix('.')),
            };
            *has && of_parent
                .and_then(|rest| rest.split_once('.'))
                .is_some_and(|(own, _)| names.contains(&own))
        };
        has_gradient.iter().any(is_one)
    };
    // What has a gradient tells where in attention the others lost it.
    let is_query_or_key = QUERY_OR_KEY.contains(&own);
    if is_query_or_key && has_sibling(&VALUE) {
        return Some(WEIGHTS);
    }
    ((is_query_or_key || VALUE.contains(&own)) && has_sibling(&OUTPUT)).then_some(WHOLE)
}

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::named_vars;

    #[test]
    fn what_is_likely_goes_by_names_and_shapes() {
        let audit = GradientAudit::new([
            ("h.0.ln_1.weight", &[4][..], false),
            ("h.0.ln_1.bias", &[4], false),
            ("h.0.attn.q_proj.weight", &[4, 4], false),
            ("h.0.attn.v_proj.weight", &[4, 4], true),
            ("h.1.attn.q_proj.weight", &[4, 4], false),
            ("h.1.attn.v_proj.weight", &[4, 4], false),
            ("norm.weight", &[4], false),
            ("key.weight", &[4], false),
            ("value.weight", &[4], true),
            ("normal.weight", &[4, 4], false),
            ("alone", &[1], false),
            ("h.2.attn.k_proj.weight", &[4, 4], false),
            ("h.2.attn.v_proj.weight", &[4, 4], false),
            ("h.2.attn.o_proj.weight", &[4, 4], true),
        ]);
        let found: Vec<_> = audit.missing().iter().map(|(_, reason)| *reason).collect();
        let (likely, other) = (NoGradient::Likely, NoGradient::NotReached);
        let weights = likely(WEIGHTS);
        assert_eq!(
            found,
            [
                likely("layer_norm"),
                likely("layer_norm"),
                weights,
                other,
                other,
                likely("rms_norm"),
                weights,
                other,
                other,
                likely(WHOLE),
                likely(WHOLE),
            ]
        );
        let line = audit.to_string();
        for part in [
            "11 of 14 parameters",
            "h.0.ln_1.weight, h.0.ln_1.bias,",
            "and 6 more",
            "training::RmsNorm",
            "candle's layer_norm",
            "candle's sdpa, at h.2.attn.k_proj.weight, has none: use training::attention",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(!line.contains('\n'));
    }

    #[test]
    fn frozen_parameters_are_named_by_whole_parts() {
        let config = AuditConfig { frozen: vec!["a.b".into()], ..AuditConfig::default() };
        assert!(config.is_frozen("a.b") && config.is_frozen("a.b.weight"));
        assert!(!config.is_frozen("a.bc") && !config.is_frozen("a") && !config.is_frozen("x.a.b"));
    }

    /// An operation whose backward returns no gradient.
    struct Nothing;

    impl CustomOp1 for Nothing {
        fn name(&self) -> &'static str {
            "nothing"
        }

        fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
            Ok((storage.clone(), layout.shape().clone()))
        }

        fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
            Ok(None)
        }
    }

    #[test]
    fn each_way_to_lose_a_gradient_is_told_apart() -> Result<()> {
        let vars = VarMap::new();
        let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let get = |name: &str| builder.get_with_hints(2, name, candle_nn::Init::Const(1.0));
        let (a, b, c, _) = (get("a")?, get("b")?, get("c")?, get("d")?);
        let loss = ((a.apply_op1(Nothing)? + b.detach())? + &c)?.sum_all()?;
        let found = audit(&loss, &named_vars(&vars))?;
        let expected =
            [("a", NoGradient::NotGiven), ("b", NoGradient::NotReached), ("d", NoGradient::NotReached)];
        assert_eq!(found.missing(), expected.map(|(name, reason)| (name.to_owned(), reason)));
        assert!(
            found.to_string().ends_with("an operation between a and the loss gave no gradient"),
            "{found}"
        );
        let loss = (c.sqr()?.sum_all()? + loss)?;
        assert!(
            audit(&loss, &[("c".into(), vars.data().lock().unwrap()["c"].clone())])?.missing().is_empty()
        );
        Ok(())
    }

    /// An operation without backward that is recorded in candle's graph.
    struct Forward;

    impl CustomOp1 for Forward {
        fn name(&self) -> &'static str {
            "forward_alone"
        }

        fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
            Nothing.cpu_fwd(storage, layout)
        }
    }

    #[test]
    fn an_operation_that_refuses_backward_is_named() -> Result<()> {
        let x = Var::new(&[1f32], &Device::Cpu)?;
        let loss = x.apply_op1(Forward)?.sum_all()?;
        let message = audit(&loss, &[("x".into(), x)]).unwrap_err().to_string();
        assert!(message.contains("forward_alone"), "{message}");
        Ok(())
    }
}
