//! LoRA configuration, and its form in `adapter_config.json`.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::DType;
use serde_json::{Map, Value, json};

use super::targets::{
    self, ALL, TargetsInFile, ends_with_target, expression, is_of_experts, matches, without_weights,
};
use crate::config::Fields;
use crate::files::ADAPTER_CONFIG;
use crate::names;
use crate::{Error, ModelConfig, Result};

/// Fields that have no effect here.
const HARMLESS: &[&str] = &[
    "auto_mapping", "base_model_name_or_path", "eva_config", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
];

/// Which layers have adapters, and their rank and scale.
///
/// ```
/// use models::LoraConfig;
///
/// let rank_pattern = [("down_proj".into(), 64), (r"layers\.0\..*".into(), 4)].into();
/// let lora = LoraConfig { rank: 16, alpha: 16.0, by_root: true, rank_pattern, ..LoraConfig::default() };
/// assert_eq!(lora.rank_of("model.layers.3.mlp.down_proj"), 64);
/// assert_eq!(lora.rank_of("model.layers.3.self_attn.q_proj"), 16);
/// assert_eq!(lora.scale_of("model.layers.3.mlp.down_proj"), 2.0); // 16 / sqrt(64)
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// Rank of the adapters. Default: 8.
    pub rank: usize,
    /// Ranks of layers that have another one, by pattern, as `rank_pattern` of peft: a regular expression for the whole name of the
    /// layer, or for its last parts. Of several that match a layer, the first in alphabetical order counts, as where peft reads them
    /// from a file. Default: none.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Numerator of the scale of an adapter, see [`scale_of`](Self::scale_of). Default: 16.
    pub alpha: f64,
    /// Alphas of layers that have another one, by pattern, as [`rank_pattern`](Self::rank_pattern). Default: none.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Layers with an adapter, by the last parts of their names; "all-linear" stands for all except the head and experts. Of experts,
    /// `experts.gate_up_proj` and `experts.down_proj` have one, as `target_parameters` of peft. Default: "all-linear".
    pub targets: Vec<String>,
    /// Whether the scale is alpha over the square root of the rank (rsLoRA), instead of alpha over the rank: updates then have
    /// the same size whatever the rank is. Default: false.
    pub by_root: bool,
    /// Whether each output has a trained magnitude besides (DoRA): the norm of its row of the changed weight, apart from the row's
    /// direction. In backward the norms are constants, as in peft, see [`Lora::stopped_gradients`](super::Lora::stopped_gradients).
    /// Default: false.
    pub dora: bool,
    /// Dropout probability of the adapters' input in training, as for [`ModelConfig::dropout`]. Default: 0.
    pub dropout: f64,
    /// Modules that are trained whole beside the adapters, by the last parts of their names, as `modules_to_save` of peft: the
    /// embedding (`embed_tokens`, of GPT-2 `wte`) and the head (`lm_head`). Where the two are tied, each stands for both. A head that
    /// scores documents (`score`) is always one of them. Default: none.
    pub save_modules: Vec<String>,
    /// Dtype of the adapters, for example f32 with a model in bf16; it is not saved. Sharded and divided models have a
    /// single dtype. Default: none, the model's dtype.
    pub dtype: Option<DType>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            rank: 8,
            rank_pattern: BTreeMap::new(),
            alpha: 16.0,
            alpha_pattern: BTreeMap::new(),
            targets: vec![ALL.into()],
            by_root: false,
            dora: false,
            dropout: 0.0,
            save_modules: Vec::new(),
            dtype: None,
        }
    }
}

impl LoraConfig {
    /// The highest rank: more than the narrower side of any layer's matrix has.
    pub const MAX_RANK: usize = 1 << 16;

    /// Returns the rank of the adapter of a layer.
    pub fn rank_of(&self, layer: &str) -> usize {
        of_pattern(&self.rank_pattern, layer).unwrap_or(self.rank)
    }

    /// Returns the factor of the output of a layer's adapter: its alpha over its rank, or over the root of that.
    pub fn scale_of(&self, layer: &str) -> f64 {
        let rank = self.rank_of(layer) as f64;
        let alpha = of_pattern(&self.alpha_pattern, layer).unwrap_or(self.alpha);
        alpha / if self.by_root { rank.sqrt() } else { rank }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let refuse = |field, got: String, help| Err(Error::Invalid { what: "LoraConfig", field, got, help });
        let named = |pattern: &str, value: String| format!("{value} for {pattern:?}");
        let ranks = self
            .rank_pattern
            .iter()
            .map(|(pattern, rank)| ("rank_pattern", named(pattern, rank.to_string()), *rank));
        for (field, got, rank) in std::iter::once(("rank", self.rank.to_string(), self.rank)).chain(ranks) {
            match rank {
                0 => return refuse(field, got, "it must be above 0"),
                1..=Self::MAX_RANK => {}
                _ => return refuse(field, got, "it must be 65536 at most"),
            }
        }
        let alphas = self
            .alpha_pattern
            .iter()
            .map(|(pattern, alpha)| ("alpha_pattern", named(pattern, alpha.to_string()), *alpha));
        for (field, got, alpha) in
            std::iter::once(("alpha", self.alpha.to_string(), self.alpha)).chain(alphas)
        {
            if !alpha.is_finite() {
                return refuse(field, got, "it must be a finite number");
            }
        }
        if let Some((field, pattern)) = self.patterns().find(|(_, pattern)| expression(pattern).is_none()) {
            return refuse(
                field,
                format!("{pattern:?}"),
                "it must be the end of a layer's name, or a regular expression for it",
            );
        }
        if !(0.0..=1.0).contains(&self.dropout) {
            return refuse("dropout", self.dropout.to_string(), "it must be a number from 0 to 1");
        }
        if self.targets.is_empty() {
            return refuse("targets", "empty".into(), "give the names of layers, or all-linear");
        }
        Ok(())
    }

    /// Refuses adapters of experts with what those have not.
    pub(super) fn check_experts(&self) -> Result<()> {
        let refuse = |field, got: String| {
            let help = "adapters of experts have neither dropout nor magnitudes (nor have they in peft): leave experts out of the targets, or train without";
            Err(Error::Invalid { what: "LoraConfig", field, got, help })
        };
        match self.targets.iter().any(|target| is_of_experts(target)) {
            true if self.dropout > 0.0 => refuse("dropout", self.dropout.to_string()),
            true if self.dora => refuse("dora", "true".into()),
            _ => Ok(()),
        }
    }

    /// Returns the patterns of ranks and alphas, each with the field that it is in.
    pub(super) fn patterns(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let ranks = self.rank_pattern.keys().map(|pattern| ("rank_pattern", pattern));
        ranks.chain(self.alpha_pattern.keys().map(|pattern| ("alpha_pattern", pattern)))
    }

    /// Returns whether a layer has an adapter.
    pub(super) fn is_target(&self, layer: &str) -> bool {
        let is_of_expert = names::is_of_expert(layer);
        self.targets.iter().any(|target| ends_with_target(target, layer) || (target == ALL && !is_of_expert))
    }

    /// Reads `adapter_config.json` of adapters of a model.
    pub(super) fn read(json: &Map<String, Value>, model: &ModelConfig) -> Result<Self> {
        let mut fields = Fields::new(ADAPTER_CONFIG, "LoRA".into(), HARMLESS, json);
        fields.require_supported("peft_type", &json!("LORA"))?;
        fields.require_supported("bias", &json!("none"))?;
        // Initializations that leave the model's own weights unchanged.
        match fields.value("init_lora_weights") {
            None | Some(Value::Bool(_)) => {}
            Some(Value::String(how)) if ["gaussian", "orthogonal", "eva"].contains(&&**how) => {}
            Some(other) => {
                let help = "supported are true, false, \"gaussian\", \"orthogonal\" and \"eva\"; others may change the \
                            model's own weights: convert the adapters with peft first";
                return Err(fields.invalid_value("init_lora_weights", other, help));
            }
        }
        let default = Self::default();
        let rank = fields.size("r")?;
        let alpha = fields.number("lora_alpha")?.unwrap_or(8.0);
        let (rank_pattern, alpha_pattern) = (ranks_of(&mut fields)?, alphas_of(&mut fields)?);
        let by_root = fields.flag("use_rslora", false)?;
        let dora = fields.flag("use_dora", false)?;
        let dropout = fields.probability("lora_dropout", 0.0)?;
        let parameters = parameters_of(&mut fields)?;
        let mut targets = match fields.value("target_modules") {
            None if !parameters.is_empty() => Vec::new(),
            None => return Err(fields.config_error("target_modules", "missing", "give the names of layers")),
            Some(Value::String(all)) if all == ALL => default.targets,
            Some(other) => match names_of(other) {
                Some(names) => names,
                None => {
                    let help = "supported are a list of names and \"all-linear\"";
                    return Err(fields.invalid_value("target_modules", other, help));
                }
            },
        };
        targets.extend(parameters);
        let save_modules = saved_of(&mut fields, model)?;
        for note in fields.finish()? {
            tracing::warn!("{ADAPTER_CONFIG}: {note}");
        }
        let config = Self {
            rank,
            rank_pattern,
            alpha,
            alpha_pattern,
            targets,
            by_root,
            dora,
            dropout,
            save_modules,
            dtype: None,
        };
        config.validate()?;
        Ok(config)
    }

    /// Returns the `adapter_config.json` that `peft` reads; `linear` are the layers with adapters, without experts.
    pub(super) fn json(&self, model: &ModelConfig, linear: &[String], base: Option<&Path>) -> Value {
        let targets = TargetsInFile::of(&self.targets, model, linear);
        if !targets.by_weight.is_empty() && (self.dora || self.dropout > 0.0) {
            tracing::warn!(
                "peft cannot load these adapters: layers that experts have, too, have neither dropout nor magnitudes there"
            );
        }
        json!({
            "alpha_pattern": targets.patterns(&self.alpha_pattern),
            "base_model_name_or_path": base.map_or_else(|| json!(model.json().get("_name_or_path")), |base| json!(base)),
            "bias": "none",
            "ensure_weight_tying": model.tied && !self.save_modules.is_empty(),
            "fan_in_fan_out": model.family == crate::Family::Gpt2,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            // Of a tied embedding and head, peft ties its copies only if the name of the head says so for all families.
            "modules_to_save": match (self.save_modules.is_empty(), model.tied) {
                (true, _) => Value::Null,
                (false, true) => json!(["lm_head"]),
                (false, false) => json!(self.save_modules),
            },
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": targets.patterns(&self.rank_pattern),
            "target_modules": targets.modules(),
            "target_parameters": if targets.parameters.is_empty() { Value::Null } else { json!(targets.parameters) },
            "task_type": if model.labels.is_some() { "SEQ_CLS" } else { "CAUSAL_LM" },
            "use_dora": self.dora,
            "use_rslora": self.by_root,
        })
    }
}

/// Reads the parameters with an adapter: weights of experts, and those of linear layers.
fn parameters_of(fields: &mut Fields<'_>) -> Result<Vec<String>> {
    let Some(value) = fields.value("target_parameters") else { return Ok(Vec::new()) };
    let targets = |names: Vec<String>| names.iter().map(|name| targets::of_parameter(name)).collect();
    match names_of(value).and_then(targets) {
        Some(targets) => Ok(targets),
        None => {
            let help = "supported are the weights of experts, experts.gate_up_proj and experts.down_proj, and those of linear layers";
            Err(fields.invalid_value("target_parameters", value, help))
        }
    }
}

/// Returns the names of a list.
fn names_of(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|name| name.as_str().map(String::from)).collect()
}

/// Reads the modules that are trained whole.
fn saved_of(fields: &mut Fields<'_>, model: &ModelConfig) -> Result<Vec<String>> {
    let is_tied = fields.flag("ensure_weight_tying", false)?;
    let Some(value) = fields.value("modules_to_save") else { return Ok(Vec::new()) };
    let Some(mut names) = names_of(value) else {
        return Err(fields.invalid_value("modules_to_save", value, "it must be a list of names or null"));
    };
    if model.labels.is_some() {
        // peft adds the name of other models' heads.
        names.retain(|name| name != "classifier");
    }
    if model.tied && !is_tied && !names.is_empty() {
        let help = "with modules_to_save, peft then trains embedding and head apart, which this model ties \
                    (tie_word_embeddings): train them with ensure_weight_tying=True, or a model that does not tie them";
        return Err(fields.config_error("ensure_weight_tying", "false", help));
    }
    Ok(names)
}

/// Reads ranks by pattern.
fn ranks_of(fields: &mut Fields<'_>) -> Result<BTreeMap<String, usize>> {
    let Some(mut ranks) = fields.object("rank_pattern")? else { return Ok(BTreeMap::new()) };
    let all: Result<BTreeMap<_, _>> =
        ranks.names().map(|pattern| Ok((pattern.clone(), ranks.size(pattern)?))).collect();
    Ok(without_weights(&all?))
}

/// Reads alphas by pattern.
fn alphas_of(fields: &mut Fields<'_>) -> Result<BTreeMap<String, f64>> {
    let Some(mut alphas) = fields.object("alpha_pattern")? else { return Ok(BTreeMap::new()) };
    let names = alphas.names();
    let alpha = |pattern: &String| match alphas.number(pattern)? {
        Some(alpha) => Ok((pattern.clone(), alpha)),
        None => Err(alphas.config_error(pattern, "null", "it must be a number")),
    };
    Ok(without_weights(&names.map(alpha).collect::<Result<BTreeMap<_, _>>>()?))
}

/// Returns what is given for the first pattern that matches a layer.
fn of_pattern<T: Copy>(patterns: &BTreeMap<String, T>, layer: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| matches(pattern, layer)).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Lora;

    fn model(json: &str) -> ModelConfig {
        ModelConfig::from_json(&format!(
            r#"{{"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1,
            "max_position_embeddings": 8, "rms_norm_eps": 1e-6, {json}}}"#
        ))
        .unwrap()
    }

    /// Returns what the file of adapters with these targets has.
    fn in_file(model: &ModelConfig, targets: &[&str], pattern: &str) -> Value {
        let targets = targets.iter().map(ToString::to_string).collect();
        let rank_pattern = [(pattern.to_string(), 3)].into();
        let config = LoraConfig { targets, rank_pattern, ..LoraConfig::default() };
        let lora = Lora::new(&config, model).unwrap();
        let linear: Vec<String> = super::super::layers(lora.shapes())
            .into_iter()
            .filter(|layer| !names::is_of_expert(layer))
            .collect();
        config.json(model, &linear, None)
    }

    #[test]
    fn all_layers_are_saved_as_one_name() {
        let model = model(r#""model_type": "llama""#);
        let of = |targets: &[&str]| in_file(&model, targets, "q_proj")["target_modules"].clone();
        assert_eq!(of(&["all-linear", "q_proj"]), json!("all-linear"));
        assert_eq!(of(&["v_proj", "q_proj"]), json!(["v_proj", "q_proj"]));
    }

    /// As names of modules, peft would take them for those of experts.
    #[test]
    fn dense_layers_among_experts_are_named_by_their_weights() {
        let model = model(
            r#""model_type": "qwen3_moe", "num_key_value_heads": 1, "head_dim": 4, "num_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 4, "mlp_only_layers": [1], "norm_topk_prob": true, "decoder_sparse_step": 1"#,
        );
        let all = in_file(&model, &["all-linear", "experts.down_proj"], "up_proj");
        assert_eq!(all["target_modules"], json!(["k_proj", "o_proj", "q_proj", "v_proj"]));
        let weights = ["down", "gate", "up"].map(|name| format!("layers.1.mlp.{name}_proj.weight"));
        let parameters = [vec!["experts.down_proj".to_string()], weights.to_vec()].concat();
        assert_eq!(all["target_parameters"], json!(parameters));
        assert_eq!(all["rank_pattern"], json!({"up_proj": 3, r"(up_proj)\.weight": 3}));
        // And back.
        let back: Vec<_> = parameters.iter().map(|name| targets::of_parameter(name).unwrap()).collect();
        assert_eq!(back[1], "layers.1.mlp.down_proj");
        let read: BTreeMap<String, usize> = serde_json::from_value(all["rank_pattern"].clone()).unwrap();
        assert_eq!(without_weights(&read), [("up_proj".to_string(), 3)].into());
        let one = in_file(&model, &["mlp.up_proj", "q_proj"], "q_proj");
        assert_eq!(
            (&one["target_modules"], &one["rank_pattern"]),
            (&json!(["q_proj"]), &json!({"q_proj": 3}))
        );
        assert_eq!(one["target_parameters"], json!(["layers.1.mlp.up_proj.weight"]));
    }
}
