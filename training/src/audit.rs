//! Audit: looks for parameters that get no gradient, and warns of them or fails.

use std::collections::{HashMap, HashSet};

use candle_core::{Tensor, TensorId, Var};
use ops::kernels::warn;

use crate::{Error, GradientAudit, NoGradient, Result};

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
        let looked_at = parameters.into_iter().filter(|(name, ..)| !is_frozen(&self.frozen, name));
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
}

/// Whether a parameter is one of these, or below one.
pub(crate) fn is_frozen(frozen: &[String], name: &str) -> bool {
    let is_below = |rest: &str| rest.is_empty() || rest.starts_with('.');
    frozen.iter().any(|frozen| name.strip_prefix(frozen.as_str()).is_some_and(is_below))
}

/// Returns which of these variables get no gradient from `loss`, with the likely reason.
///
/// In candle 0.11 gradients stop silently at the following operations, since they leave nothing in the graph; the
/// replacement is in brackets: `softmax_last_dim` ([`softmax`](ops::softmax)), `layer_norm`
/// ([`LayerNorm`](ops::LayerNorm)), `rms_norm` ([`RmsNorm`](ops::RmsNorm)), `rope`, `rope_i` and `rope_thd`
/// ([`Rotary`](ops::Rotary)), `sdpa` ([`attention`](ops::attention)), and products with quantised weights.
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
    let grads = ops::backward(loss)?;
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

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape};
    use candle_nn::{VarBuilder, VarMap};

    use super::*;
    use crate::named_vars;

    #[test]
    fn frozen_parameters_are_named_by_whole_parts() {
        let config = AuditConfig { frozen: vec!["a.b".into()], ..AuditConfig::default() };
        assert!(is_frozen(&config.frozen, "a.b") && is_frozen(&config.frozen, "a.b.weight"));
        assert!(
            !is_frozen(&config.frozen, "a.bc")
                && !is_frozen(&config.frozen, "a")
                && !is_frozen(&config.frozen, "x.a.b")
        );
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
