//! `config.json` of Llama, Mistral, Qwen2 and Qwen3, with and without experts.

use ops::Gate;
use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::{DropoutConfig, Family, ModelConfig, experts, rope};
use crate::Result;

pub(super) fn read(family: Family, fields: &mut Fields<'_>) -> Result<ModelConfig> {
    fields.require_supported("is_causal", &json!(true))?;
    let (hidden_size, num_heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let (num_layers, max_len) =
        (fields.layers("num_hidden_layers")?, fields.size("max_position_embeddings")?);
    let head_dim = head_dim(family, fields, hidden_size, num_heads)?;
    let num_kv_heads = kv_heads(family, fields, num_heads)?;
    let attention_bias = match family {
        Family::Llama | Family::Qwen3 | Family::Qwen3Moe => fields.flag("attention_bias", false)?,
        _ => false,
    };
    let windows = windows(family, fields, num_layers)?;
    let notes: Vec<String> = padding(fields).into_iter().collect();
    let qkv_bias = match family {
        Family::Qwen2 => true,
        Family::Qwen2Moe => fields.flag("qkv_bias", true)?,
        _ => attention_bias,
    };
    let [norm_eps, theta] = if family == Family::Mixtral { [1e-5, 1e6] } else { [1e-6, 1e4] };
    Ok(ModelConfig {
        family,
        vocab_size: fields.size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.size("intermediate_size")?,
        experts: experts::read(family, fields, num_layers)?,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        latent: None,
        max_len,
        norm_eps: fields.not_negative("rms_norm_eps")?.unwrap_or(norm_eps),
        activation: activation(fields, "hidden_act", "silu")?,
        rotary: Some(rope::read(fields, head_dim, max_len, theta, None)?),
        windows,
        qkv_bias,
        out_bias: attention_bias,
        mlp_bias: family == Family::Llama && fields.flag("mlp_bias", false)?,
        qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
        tied: fields.flag("tie_word_embeddings", false)?,
        labels: None,
        dropout: DropoutConfig {
            attention: fields.probability("attention_dropout", 0.0)?,
            ..DropoutConfig::default()
        },
        initializer_range: fields.not_negative("initializer_range")?.unwrap_or(0.02),
        json: Map::new(),
        notes,
    })
}

/// Reads the width of a head.
fn head_dim(family: Family, fields: &mut Fields<'_>, hidden_size: usize, num_heads: usize) -> Result<usize> {
    match (fields.optional_size("head_dim")?, family) {
        (Some(head_dim), _) => Ok(head_dim),
        (None, Family::Qwen3) => Ok(128),
        (None, _) if num_heads > 0 && hidden_size.is_multiple_of(num_heads) => Ok(hidden_size / num_heads),
        (None, _) => {
            Err(fields.config_error("head_dim", "missing", "num_attention_heads does not divide hidden_size"))
        }
    }
}

/// Reads the sliding window of each layer.
fn windows(family: Family, fields: &mut Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>> {
    Ok(match family {
        Family::Mistral => mistral_windows(fields, num_layers)?,
        Family::Mixtral => vec![fields.optional_size("sliding_window")?; num_layers],
        Family::Qwen2Moe => qwen2_moe_windows(fields, num_layers)?,
        Family::Qwen3Moe => qwen3_moe_windows(fields, num_layers)?,
        Family::Qwen2 | Family::Qwen3 => qwen_windows(fields, num_layers)?,
        _ => {
            fields.require_supported("layer_types", &json!(vec!["full_attention"; num_layers]))?;
            vec![None; num_layers]
        }
    })
}

/// Reads the number of key-value heads. Null means as many as `num_heads`, and so does a missing field, which only
/// Llama may have.
fn kv_heads(family: Family, fields: &mut Fields<'_>, num_heads: usize) -> Result<usize> {
    match (fields.optional_size("num_key_value_heads")?, family) {
        (Some(heads), _) => Ok(heads),
        (None, Family::Llama) => Ok(num_heads),
        (None, _) if fields.has("num_key_value_heads") => Ok(num_heads),
        (None, _) => Err(fields.config_error("num_key_value_heads", "missing", "give a whole number")),
    }
}

/// Returns a note if the configuration has a padding token: transformers computes no gradient for its embedding.
pub(super) fn padding(fields: &mut Fields<'_>) -> Option<String> {
    fields.value("pad_token_id").map(|token| {
        format!(
            "pad_token_id of {token}: where rows contain that token, its embedding is trained like the others where the model is"
        )
    })
}

/// Reads the activation of the feed-forward layers.
pub(super) fn activation(fields: &mut Fields<'_>, name: &str, default: &str) -> Result<Gate> {
    match fields.text(name)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Gate::Silu),
        "gelu" => Ok(Gate::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Gate::GeluTanh),
        other => {
            let help = "supported are silu, gelu, gelu_new and gelu_pytorch_tanh";
            Err(fields.config_error(name, &format!("{other:?}"), help))
        }
    }
}

/// Reads the sliding window, the same for all blocks: 4096 if the field is missing, none if it is null.
fn mistral_windows(fields: &mut Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>> {
    let is_there = fields.has("sliding_window");
    let window = fields.optional_size("sliding_window")?;
    Ok(vec![if is_there { window } else { Some(4096) }; num_layers])
}

/// Reads the sliding window, the same for all blocks, if `use_sliding_window` is set.
fn qwen3_moe_windows(fields: &mut Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>> {
    // Not read by transformers.
    fields.optional_size("max_window_layers")?;
    let is_there = fields.has("sliding_window");
    let window = fields.optional_size("sliding_window")?;
    let window = if is_there { window } else { Some(4096) };
    let is_on = fields.flag("use_sliding_window", false)?;
    Ok(vec![window.filter(|_| is_on); num_layers])
}

/// Reads the sliding window of each block, from `layer_types`; without that, every second of the first `max_window_layers` blocks
/// has one, if `use_sliding_window` is set.
fn qwen2_moe_windows(fields: &mut Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>> {
    if fields.value("layer_types").is_some() || !fields.flag("use_sliding_window", false)? {
        return qwen_windows(fields, num_layers);
    }
    let is_there = fields.has("sliding_window");
    let window = fields.optional_size("sliding_window")?;
    let window = if is_there { window } else { Some(4096) };
    let first = fields.optional_size("max_window_layers")?.unwrap_or(28);
    let is_windowed = |layer: usize| layer.is_multiple_of(2) && layer < first;
    Ok((0..num_layers).map(|layer| window.filter(|_| is_windowed(layer))).collect())
}

/// Reads the sliding window of each block, from `layer_types` or `max_window_layers`; no windows unless
/// `use_sliding_window` is set.
fn qwen_windows(fields: &mut Fields<'_>, num_layers: usize) -> Result<Vec<Option<usize>>> {
    let window = fields.optional_size("sliding_window")?;
    let is_on = fields.flag("use_sliding_window", false)?;
    let first = fields.optional_size("max_window_layers")?.unwrap_or(28);
    let types = fields.value("layer_types");
    if !is_on && types.is_none() {
        return Ok(vec![None; num_layers]);
    }
    let windowed = match types {
        None => (0..num_layers).map(|layer| layer >= first).collect::<Vec<_>>(),
        Some(types) => {
            let kind = |kind: &Value| match kind.as_str() {
                Some("full_attention") => Some(false),
                Some("sliding_attention") => Some(true),
                _ => None,
            };
            let found = types.as_array().and_then(|types| types.iter().map(kind).collect::<Option<Vec<_>>>());
            match found.filter(|found| found.len() == num_layers) {
                Some(found) => found,
                None => {
                    let help = "it must be full_attention or sliding_attention for each of num_hidden_layers";
                    return Err(fields.invalid_value("layer_types", types, help));
                }
            }
        }
    };
    // Without `use_sliding_window`, `sliding_window` is ignored.
    let window = window.filter(|_| is_on);
    if windowed.contains(&true) && window.is_none() {
        return Err(fields.config_error(
            "sliding_window", "missing or turned off", "blocks of sliding_attention need one",
        ));
    }
    Ok(windowed.into_iter().map(|is_windowed| window.filter(|_| is_windowed)).collect())
}
