//! What an audit finds: the parameters without a gradient, and the likely reason.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

/// Maximum number of names listed in a message.
const NAMES: usize = 5;

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
    pub(crate) missing: Vec<(String, NoGradient)>,
    total: usize,
}

impl GradientAudit {
    pub(crate) fn new<'a>(parameters: impl IntoIterator<Item = (&'a str, &'a [usize], bool)>) -> Self {
        let all: Vec<_> = parameters.into_iter().collect();
        let known: Known<'_> = all.iter().map(|&(name, dims, has)| (name, (dims, has))).collect();
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
            write!(f, ": candle's ")?;
            for (operation, instead) in WITHOUT_BACKWARD {
                write!(f, "{operation} (use {instead}), ")?;
            }
            write!(f, "or a product with quantised weights")?;
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

/// Operations of candle 0.11 that leave nothing in its graph, and what replaces each. `candle_nn`'s layers of the same names
/// call them.
pub(crate) const WITHOUT_BACKWARD: [(&str, &str); 5] = [
    ("layer_norm", "ops::LayerNorm"),
    ("rms_norm", "ops::RmsNorm"),
    ("softmax_last_dim", "ops::softmax"),
    ("rope", "ops::Rotary"),
    (WHOLE, "ops::attention"),
];

/// Replacement for a candle operation without backward.
fn instead(operation: &str) -> &'static str {
    let known = WITHOUT_BACKWARD.iter().find(|(name, _)| *name == operation);
    known.map_or("ops::attention, or ops::softmax and ops::Rotary", |(_, instead)| instead)
}

/// Shape of each parameter, and whether it has a gradient.
type Known<'a> = HashMap<&'a str, (&'a [usize], bool)>;

/// The candle operation without backward that most likely uses this parameter.
fn likely(name: &str, dims: &[usize], known: &Known<'_>) -> Option<&'static str> {
    let (module, _) = name.rsplit_once('.')?;
    let (parent, own) = module.rsplit_once('.').unwrap_or(("", module));
    let other = |last: &str| known.get(format!("{module}.{last}").as_str());
    let norm =
        || if ["bias", "beta"].iter().any(|last| other(last).is_some()) { "layer_norm" } else { "rms_norm" };
    if dims.len() == 1 && (own.contains("norm") || own.starts_with("ln")) {
        return Some(norm());
    }
    let has_sibling = |names: &[&str]| {
        let is_one = |(name, (_, has)): (&&str, &(&[usize], bool))| {
            let of_parent = match parent {
                "" => Some(*name),
                parent => name.strip_prefix(parent).and_then(|rest| rest.strip_prefix('.')),
            };
            *has && of_parent
                .and_then(|rest| rest.split_once('.'))
                .is_some_and(|(own, _)| names.contains(&own))
        };
        known.iter().any(is_one)
    };
    // What has a gradient tells where in attention the others lost it.
    let is_query_or_key = QUERY_OR_KEY.contains(&own);
    if is_query_or_key && has_sibling(&VALUE) {
        return Some(WEIGHTS);
    }
    if (is_query_or_key || VALUE.contains(&own)) && has_sibling(&OUTPUT) {
        return Some(WHOLE);
    }
    // The weight of a linear layer, of a convolution and of an embedding has several dimensions.
    let is_norm = |(dims, has): &(&[usize], bool)| dims.len() == 1 && !has;
    ["weight", "gamma"].iter().filter_map(|last| other(last)).any(is_norm).then(norm)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            "ops::RmsNorm",
            "candle's layer_norm",
            "candle's sdpa, at h.2.attn.k_proj.weight, has none: use ops::attention",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(!line.contains('\n'));
    }

    /// What is not recognised by its name gets the list of candle's operations, and what replaces each.
    #[test]
    fn all_operations_are_named_where_none_is_likely() {
        let line = GradientAudit::new([("cell.w_ih", &[4, 4][..], false)]).to_string();
        for (operation, instead) in WITHOUT_BACKWARD {
            assert!(line.contains(&format!("{operation} (use {instead})")), "{line}");
        }
        // A layer of any name whose weight is no matrix is a norm.
        let audit = GradientAudit::new([("2.weight", &[4][..], false), ("2.bias", &[4], false)]);
        assert!(audit.to_string().contains("likely candle's layer_norm, at 2.weight"), "{audit}");
        let linear = GradientAudit::new([("2.weight", &[4, 4][..], false), ("2.bias", &[4], false)]);
        assert!(linear.missing().iter().all(|(_, reason)| *reason == NoGradient::NotReached), "{linear}");
    }
}
