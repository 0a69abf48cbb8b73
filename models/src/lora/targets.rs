//! Targets of adapters, as a configuration and as peft's files have them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use regex::bytes::{Regex, RegexBuilder};
use serde_json::{Value, json};

use crate::names::{self, JOINED, OfExpert};
use crate::{Family, ModelConfig};

/// Target name for all linear layers except the head and experts.
pub(super) const ALL: &str = "all-linear";
/// End of the name of a layer's weight.
const WEIGHT: &str = ".weight";
/// Layers that experts have, too.
const FEED_FORWARD: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// The targets of a configuration as peft's file has them.
pub(super) struct TargetsInFile {
    /// Names of layers.
    modules: Vec<String>,
    /// Names of weights.
    pub(super) parameters: Vec<String>,
    /// The layers of whose weights the names are among the parameters.
    pub(super) by_weight: Vec<String>,
}

impl TargetsInFile {
    /// `linear` are the layers with adapters, without experts.
    pub(super) fn of(targets: &[String], model: &ModelConfig, linear: &[String]) -> Self {
        let (of_experts, mut modules): (Vec<String>, Vec<String>) =
            targets.iter().cloned().partition(|target| is_of_experts(target));
        if model.experts.is_none() {
            return Self { modules, parameters: of_experts, by_weight: Vec::new() };
        }
        if modules.iter().any(|target| target == ALL) {
            // peft takes it for routers, too, and for experts.
            let last = |layer: &String| Some(layer.rsplit_once('.')?.1.to_string());
            modules = linear.iter().filter_map(last).collect::<BTreeSet<_>>().into_iter().collect();
        }
        let (by_weight, modules): (Vec<String>, Vec<String>) =
            modules.into_iter().partition(|target| is_taken_for_experts(model.family, target));
        let is_meant = |layer: &&String| by_weight.iter().any(|target| ends_with(target, layer));
        let layers: Vec<String> = linear.iter().filter(is_meant).cloned().collect();
        let weights: BTreeSet<String> = layers.iter().map(|layer| weight_of(layer)).collect();
        Self { modules, parameters: of_experts.into_iter().chain(weights).collect(), by_weight: layers }
    }

    pub(super) fn modules(&self) -> Value {
        match self.modules.iter().any(|target| target == ALL) {
            // In a list, peft takes it for the name of a layer.
            true => json!(ALL),
            false => json!(self.modules),
        }
    }

    /// Returns patterns with those that mean the same for layers that are given by their weights: peft compares these with the name of
    /// the weight. Inverse of [`without_weights`].
    pub(super) fn patterns<T: Clone>(&self, patterns: &BTreeMap<String, T>) -> BTreeMap<String, T> {
        let of_weight = |(pattern, value): (&String, &T)| {
            let is_meant = self.by_weight.iter().any(|layer| matches(pattern, layer));
            is_meant.then(|| (format!(r"({pattern})\{WEIGHT}"), value.clone()))
        };
        patterns.iter().filter_map(of_weight).chain(patterns.clone()).collect()
    }
}

/// Returns patterns as they are for the names of layers.
pub(super) fn without_weights<T: Clone>(patterns: &BTreeMap<String, T>) -> BTreeMap<String, T> {
    let of_layer = |(pattern, value): (&String, &T)| {
        let layer = pattern.strip_suffix(r"\.weight").or_else(|| pattern.strip_suffix(WEIGHT));
        let inner = layer.and_then(|layer| layer.strip_prefix('(')?.strip_suffix(')'));
        let inner = inner.filter(|inner| Regex::new(inner).is_ok()).or(layer);
        (inner.unwrap_or(pattern).to_string(), value.clone())
    };
    patterns.iter().map(of_layer).collect()
}

/// Returns the target of a parameter's name in peft's file, of which it may have the last part alone for experts; `None` if it is
/// neither a weight of experts nor that of a layer.
pub(super) fn of_parameter(name: &str) -> Option<String> {
    match name.strip_suffix(WEIGHT) {
        Some(layer) => Some(layer.into()),
        None if JOINED.contains(&name) => Some(format!("experts.{name}")),
        None => is_of_experts(name).then(|| name.into()),
    }
}

/// Whether peft (0.21) takes a layer's name for that of experts, as files of `transformers` 4 have them, whichever layer is meant.
fn is_taken_for_experts(family: Family, target: &str) -> bool {
    let last = target.rsplit_once('.').map_or(target, |(_, last)| last);
    matches!(family, Family::Qwen3Moe | Family::DeepseekV3) && FEED_FORWARD.contains(&last)
}

/// Returns a name of a layer's weight that no other kind of layer has: that of the shared experts of all blocks, or of one block.
fn weight_of(layer: &str) -> String {
    let from = ["shared_experts.", "layers."].iter().find_map(|part| layer.find(part));
    format!("{}{WEIGHT}", &layer[from.unwrap_or(0)..])
}

/// Whether a target is a weight of experts.
pub(super) fn is_of_experts(target: &str) -> bool {
    JOINED.iter().any(|weight| ends_with(&format!("experts.{weight}"), target))
}

/// Returns the name of a layer without the number of an expert.
fn of_all_experts(layer: &str) -> Cow<'_, str> {
    OfExpert::of(layer).map_or(layer.into(), |of| of.of_all().into())
}

/// Whether a pattern matches a layer's name, or the end of it that follows a dot.
pub(super) fn matches(pattern: &str, layer: &str) -> bool {
    let layer = of_all_experts(layer);
    expression(pattern).is_some_and(|expression| expression.is_match(layer.as_bytes()))
}

/// Returns the expression of a pattern.
pub(super) fn expression(pattern: &str) -> Option<Regex> {
    // Of ASCII, as names of layers are.
    RegexBuilder::new(&format!(r"^(.*\.)?({pattern})$")).unicode(false).build().ok()
}

/// Returns whether a layer's name ends with a target, at a dot. The layer of an expert is that of all of them, and only a target of experts
/// is one of theirs.
pub(super) fn ends_with_target(target: &str, layer: &str) -> bool {
    let is_of_kind = !names::is_of_expert(layer) || is_of_experts(target);
    is_of_kind && ends_with(target, &of_all_experts(layer))
}

/// Returns whether a name ends with another, at a dot.
fn ends_with(end: &str, name: &str) -> bool {
    name.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_peft_are_targets() {
        assert_eq!(of_parameter("gate_up_proj").as_deref(), Some("experts.gate_up_proj"));
        assert_eq!(of_parameter("mlp.experts.down_proj").as_deref(), Some("mlp.experts.down_proj"));
        assert_eq!(of_parameter("mlp.gate.weight").as_deref(), Some("mlp.gate"));
        assert_eq!(of_parameter("q_proj.bias"), None);
        assert_eq!(weight_of("model.layers.7.mlp.shared_experts.up_proj"), "shared_experts.up_proj.weight");
        let read =
            |pattern: &str| without_weights(&[(pattern.to_string(), 1)].into()).into_keys().next().unwrap();
        assert_eq!(
            ["a.weight", "((a)|(b))\\.weight", "(a)|(b)\\.weight", "b"].map(read),
            ["a", "(a)|(b)", "(a)|(b)", "b"]
        );
    }
}
