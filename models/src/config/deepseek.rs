//! `config.json` of DeepSeek V3.

use ops::{RotaryConfig, RotaryLayout};
use serde_json::{Map, json};

use super::fields::Fields;
use super::{DropoutConfig, Family, ModelConfig, experts, llama, rope};
use crate::Result;

/// Latent attention: keys and values are projected from a few features of each token, and a part of each query and key has the
/// position. All heads have the part of the key with the position in common.
///
/// # Source
/// DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LatentConfig {
    /// Number of features from which queries are projected (`q_lora_rank`); `None` if they are projected from those of the model.
    pub query_rank: Option<usize>,
    /// Number of features from which keys and values are projected (`kv_lora_rank`).
    pub key_rank: usize,
    /// Width of the part of queries and keys without the position (`qk_nope_head_dim`).
    pub plain_dim: usize,
    /// Width of the part of queries and keys with the position (`qk_rope_head_dim`).
    pub rotary_dim: usize,
    /// Width of a head of values (`v_head_dim`).
    pub value_dim: usize,
    /// Factor of the attention scores.
    pub scale: f64,
}

impl LatentConfig {
    /// Sizes that must be above 0.
    pub(super) fn sizes(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let ranks = [("q_lora_rank", self.query_rank.unwrap_or(1)), ("kv_lora_rank", self.key_rank)];
        ranks.into_iter().chain([
            ("qk_nope_head_dim", self.plain_dim),
            ("qk_rope_head_dim", self.rotary_dim),
            ("v_head_dim", self.value_dim),
        ])
    }
}

/// Reads latent attention and its rotary embedding.
fn latent(fields: &mut Fields<'_>, num_heads: usize, max_len: usize) -> Result<(LatentConfig, RotaryConfig)> {
    let size = |fields: &mut Fields<'_>, name: &str, missing: usize| {
        Ok::<_, crate::Error>(fields.optional_size(name)?.unwrap_or(missing))
    };
    let query_rank = match fields.has("q_lora_rank") {
        true => fields.optional_size("q_lora_rank")?,
        false => Some(1536),
    };
    let (plain_dim, rotary_dim) =
        (size(fields, "qk_nope_head_dim", 128)?, size(fields, "qk_rope_head_dim", 64)?);
    // They follow from the others; transformers writes them, too.
    fields.require_supported("head_dim", &json!(rotary_dim))?;
    fields.require_supported("qk_head_dim", &json!(plain_dim.saturating_add(rotary_dim)))?;
    fields.require_supported("num_key_value_heads", &json!(num_heads))?;
    let mut scale = 1.0 / (plain_dim.saturating_add(rotary_dim) as f64).sqrt();
    let mut rotary = rope::read(fields, rotary_dim, max_len, 1e4, Some(&mut scale))?;
    if fields.flag("rope_interleave", true)? {
        rotary.layout = RotaryLayout::Interleaved;
    }
    let (key_rank, value_dim) = (size(fields, "kv_lora_rank", 512)?, size(fields, "v_head_dim", 128)?);
    Ok((LatentConfig { query_rank, key_rank, plain_dim, rotary_dim, value_dim, scale }, rotary))
}

pub(super) fn read(fields: &mut Fields<'_>) -> Result<ModelConfig> {
    let num_heads = fields.optional_size("num_attention_heads")?.unwrap_or(128);
    let (num_layers, max_len) =
        (fields.layers("num_hidden_layers")?, fields.size("max_position_embeddings")?);
    let (latent, rotary) = latent(fields, num_heads, max_len)?;
    let bias = fields.flag("attention_bias", false)?;
    let mut notes: Vec<String> = llama::padding(fields).into_iter().collect();
    for name in ["num_nextn_predict_layers", "num_mtp_layers"] {
        notes.extend(fields.optional_size(name)?.filter(|count| *count > 0).map(|count| {
            format!("{name} of {count}: layers that predict further tokens are not read, trained or saved")
        }));
    }
    notes.extend(fields.not_negative("aux_loss_alpha")?.filter(|alpha| *alpha > 0.0).map(|alpha| {
        format!("aux_loss_alpha of {alpha}: no loss that balances experts is added by it, as in transformers (--balance row adds one)")
    }));
    // Of the number of processes that trained, and of the form of that loss.
    for name in ["ep_size", "seq_aux"] {
        fields.value(name);
    }
    Ok(ModelConfig {
        family: Family::DeepseekV3,
        vocab_size: fields.size("vocab_size")?,
        hidden_size: fields.size("hidden_size")?,
        intermediate_size: fields.size("intermediate_size")?,
        experts: experts::read(Family::DeepseekV3, fields, num_layers)?,
        num_layers,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: latent.plain_dim.saturating_add(latent.rotary_dim),
        latent: Some(latent),
        max_len,
        norm_eps: fields.not_negative("rms_norm_eps")?.unwrap_or(1e-6),
        activation: llama::activation(fields, "hidden_act", "silu")?,
        rotary: Some(rotary),
        windows: vec![None; num_layers],
        qkv_bias: bias,
        out_bias: bias,
        mlp_bias: false,
        qk_norm: false,
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
