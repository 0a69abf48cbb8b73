//! LoRA configuration, and its form in `adapter_config.json`.

use std::path::Path;

use candle_core::DType;
use serde_json::{Map, Value, json};

use crate::config::Fields;
use crate::files::ADAPTER_CONFIG;
use crate::{Error, ModelConfig, Result};

/// Target name for all linear layers except the head.
pub(super) const ALL: &str = "all-linear";

/// The highest rank: sizes of matrices with it can be counted.
const MAX_RANK: usize = 1 << 31;

/// Fields that have no effect here.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
];

/// Which layers have adapters, and their rank and scale.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// Rank of the adapters. Default: 8.
    pub rank: usize,
    /// Numerator of the scale of an adapter, see [`scale`](Self::scale). Default: 16.
    pub alpha: f64,
    /// Layers with an adapter, by the last parts of their names; "all-linear" stands for all except the head. Default:
    /// "all-linear".
    pub targets: Vec<String>,
    /// Whether the scale is alpha over the square root of the rank, instead of alpha over the rank. Default: false.
    pub by_root: bool,
    /// Dropout probability of the adapters' input in training, as for [`ModelConfig::dropout`]. Default: 0.
    pub dropout: f64,
    /// Dtype of the adapters, for example f32 with a model in bf16; it is not saved. Sharded and divided models have a
    /// single dtype. Default: none, the model's dtype.
    pub dtype: Option<DType>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self { rank: 8, alpha: 16.0, targets: vec![ALL.into()], by_root: false, dropout: 0.0, dtype: None }
    }
}

impl LoraConfig {
    /// Returns the factor of an adapter's output.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.by_root { rank.sqrt() } else { rank }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let refuse = |field, got: String, help| Err(Error::Invalid { what: "LoraConfig", field, got, help });
        if self.rank == 0 {
            return refuse("rank", "0".into(), "it must be above 0");
        }
        if self.rank > MAX_RANK {
            return refuse("rank", self.rank.to_string(), "it must be 2147483648 at most");
        }
        if !self.alpha.is_finite() {
            return refuse("alpha", self.alpha.to_string(), "it must be a finite number");
        }
        if !(0.0..=1.0).contains(&self.dropout) {
            return refuse("dropout", self.dropout.to_string(), "it must be a number from 0 to 1");
        }
        if self.targets.is_empty() {
            return refuse("targets", "empty".into(), "give the names of layers, or all-linear");
        }
        Ok(())
    }

    /// Returns whether a layer has an adapter.
    pub(super) fn is_target(&self, layer: &str) -> bool {
        self.targets.iter().any(|target| target == ALL || ends_with_target(target, layer))
    }

    /// Reads `adapter_config.json`.
    pub(super) fn read(json: &Map<String, Value>) -> Result<Self> {
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
        let by_root = fields.flag("use_rslora", false)?;
        let dropout = fields.probability("lora_dropout", 0.0)?;
        let targets = match fields.value("target_modules") {
            None => return Err(fields.config_error("target_modules", "missing", "give the names of layers")),
            Some(Value::String(all)) if all == ALL => default.targets,
            Some(Value::Array(names)) if names.iter().all(Value::is_string) => {
                names.iter().filter_map(|name| name.as_str().map(String::from)).collect()
            }
            Some(other) => {
                let help = "supported are a list of names and \"all-linear\"";
                return Err(fields.invalid_value("target_modules", other, help));
            }
        };
        for note in fields.finish()? {
            tracing::warn!("{ADAPTER_CONFIG}: {note}");
        }
        let config = Self { rank, alpha, targets, by_root, dropout, dtype: None };
        config.validate()?;
        Ok(config)
    }

    /// Returns the `adapter_config.json` that `peft` reads.
    pub(super) fn json(&self, model: &ModelConfig, base: Option<&Path>) -> Value {
        let targets = match &self.targets[..] {
            // In a list, peft takes it for the name of a layer.
            targets if targets.iter().any(|target| target == ALL) => json!(ALL),
            targets => json!(targets),
        };
        json!({
            "base_model_name_or_path": base.map_or_else(|| json!(model.json().get("_name_or_path")), |base| json!(base)),
            "bias": "none",
            "fan_in_fan_out": model.family == crate::Family::Gpt2,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "peft_type": "LORA",
            "r": self.rank,
            "target_modules": targets,
            "task_type": "CAUSAL_LM",
            "use_rslora": self.by_root,
        })
    }
}

/// Returns whether a layer's name ends with a target, at a dot.
pub(super) fn ends_with_target(target: &str, layer: &str) -> bool {
    layer.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_layers_are_saved_as_one_name() {
        let json = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
            "num_attention_heads": 1, "max_position_embeddings": 8, "rms_norm_eps": 1e-6}"#;
        let model = ModelConfig::from_json(json).unwrap();
        let of = |targets: &[&str]| {
            let targets = targets.iter().map(ToString::to_string).collect();
            LoraConfig { targets, ..LoraConfig::default() }.json(&model, None)["target_modules"].clone()
        };
        assert_eq!(of(&["all-linear", "q_proj"]), json!("all-linear"));
        assert_eq!(of(&["v_proj", "q_proj"]), json!(["v_proj", "q_proj"]));
    }
}
