//! What a GGUF file says of a model.

use std::path::Path;

use ops::{Gate, RotaryScaling};

use super::unsupported;
use crate::gguf_file::{GgufType, Value};
use crate::reading::gguf::architecture;
use crate::{Family, ModelConfig, Result};

/// Version of the blocks of quantized types.
const QUANTIZATION_VERSION: usize = 2;

type Metadata = Vec<(String, Value)>;

/// Returns the metadata of a model without its tokenizer, and notes on what it cannot say. The file is named as the folder is.
pub(super) fn of_model(
    config: &ModelConfig,
    folder: &Path,
    dtype: GgufType,
) -> Result<(Metadata, Vec<String>)> {
    check(config)?;
    let (arch, mut notes) = (architecture(config.family), Vec::new());
    let mut all: Metadata = vec![
        ("general.architecture".into(), arch.into()),
        ("general.type".into(), "model".into()),
        ("general.file_type".into(), dtype.file_type().into()),
    ];
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.into());
    if let Some(name) = folder.file_name().and_then(|name| name.to_str()) {
        all.push(("general.name".into(), name.into()));
    }
    if dtype.is_quantized() {
        all.push(("general.quantization_version".into(), QUANTIZATION_VERSION.into()));
    }
    let mut put = |key: &str, value: Value| all.push((format!("{arch}.{key}"), value));
    put("context_length", context_length(config, &mut notes).into());
    put("embedding_length", config.hidden_size.into());
    put("block_count", config.num_layers.into());
    put("vocab_size", config.vocab_size.into());
    put("feed_forward_length", config.intermediate_size.into());
    put("attention.head_count", config.num_heads.into());
    put("attention.head_count_kv", config.num_kv_heads.into());
    let norm = if config.family == Family::Gpt2 { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
    put(&format!("attention.{norm}"), Value::F32(config.norm_eps as f32));
    if let Some(rotary) = &config.rotary {
        put("attention.key_length", config.head_dim.into());
        put("attention.value_length", config.head_dim.into());
        put("rope.dimension_count", config.head_dim.into());
        put("rope.freq_base", Value::F32(rotary.theta as f32));
        match rotary.scaling {
            RotaryScaling::Linear { factor } => {
                put("rope.scaling.type", "linear".into());
                put("rope.scaling.factor", Value::F32(factor as f32));
            }
            RotaryScaling::Yarn { factor, original_max_len, .. } => {
                put("rope.scaling.type", "yarn".into());
                put("rope.scaling.factor", Value::F32(factor as f32));
                put("rope.scaling.original_context_length", original_max_len.into());
            }
            // A tensor has the factors of llama3.
            _ => {}
        }
    }
    if let Some(experts) = &config.experts {
        put("expert_count", experts.count.into());
        put("expert_used_count", experts.per_token.into());
        put("expert_feed_forward_length", experts.width.into());
        experts.shared_width.into_iter().for_each(|width| {
            put("expert_shared_feed_forward_length", width.into());
        });
    }
    Ok((all, notes))
}

/// Returns the metadata of adapters, all of which have this scale times their rank.
pub(super) fn of_adapters(config: &ModelConfig, alpha: f64) -> Result<Metadata> {
    check(config)?;
    Ok(vec![
        ("general.architecture".into(), architecture(config.family).into()),
        ("general.type".into(), "adapter".into()),
        ("adapter.type".into(), "lora".into()),
        // What reads it divides by the rank.
        ("adapter.lora.alpha".into(), Value::F32(alpha as f32)),
    ])
}

/// Returns the longest row that is computed as the model does: that of a window, since llama.cpp has none for these families.
fn context_length(config: &ModelConfig, notes: &mut Vec<String>) -> usize {
    match config.windows.iter().flatten().min() {
        Some(window) if *window < config.max_len => {
            notes.push(format!(
                "context_length is the sliding window, {window}, in place of {}: llama.cpp would let tokens see farther",
                config.max_len
            ));
            *window
        }
        _ => config.max_len,
    }
}

/// Refuses what llama.cpp would compute otherwise.
fn check(config: &ModelConfig) -> Result<()> {
    let refuse =
        |field: &str, got: &dyn std::fmt::Debug| Err(unsupported(config, field, &format!("{got:?}")));
    if config.latent.is_some() {
        return refuse("model_type", &config.family.model_type());
    }
    if config.labels.is_some() {
        return refuse("architectures", &"a head for labels");
    }
    let activation = if config.family == Family::Gpt2 { Gate::GeluTanh } else { Gate::Silu };
    if config.activation != activation {
        return refuse("the activation", &config.activation);
    }
    let is_llama = architecture(config.family) == "llama";
    match config.family {
        Family::Gpt2 => {}
        _ if config.mlp_bias && !is_llama => return refuse("mlp_bias", &true),
        _ if config.out_bias && !is_llama => return refuse("attention_bias", &true),
        Family::Qwen2 | Family::Qwen2Moe if !config.qkv_bias => return refuse("qkv_bias", &false),
        Family::Qwen3 | Family::Qwen3Moe if config.qkv_bias => return refuse("attention_bias", &true),
        _ => {}
    }
    if let Some(RotaryScaling::Yarn { beta_fast, beta_slow, attention_factor, truncate, .. }) =
        config.rotary.as_ref().map(|rotary| rotary.scaling)
        && (beta_fast != 32.0 || beta_slow != 1.0 || attention_factor.is_some() || !truncate)
    {
        return refuse("rope_scaling", &"yarn with other values than its defaults");
    }
    let Some(experts) = &config.experts else { return Ok(()) };
    if experts.layers.contains(&false) {
        return refuse("the layers with experts", &"not all");
    }
    if experts.normalized != (config.family != Family::Qwen2Moe) {
        return refuse("norm_topk_prob", &experts.normalized);
    }
    Ok(())
}
