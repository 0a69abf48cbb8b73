//! `config.json` of GPT-2.

use serde_json::{Map, json};

use super::fields::Fields;
use super::llama::activation;
use super::{DropoutConfig, Family, ModelConfig};
use crate::Result;

pub(super) fn read(fields: &mut Fields<'_>) -> Result<ModelConfig> {
    let (hidden_size, num_heads) = (fields.size("n_embd")?, fields.size("n_head")?);
    let num_layers = fields.layers("n_layer")?;
    fields.require_supported("is_causal", &json!(true))?;
    fields.require_supported("scale_attn_weights", &json!(true))?;
    fields.require_supported("scale_attn_by_inverse_layer_idx", &json!(false))?;
    fields.require_supported("add_cross_attention", &json!(false))?;
    Ok(ModelConfig {
        family: Family::Gpt2,
        vocab_size: fields.size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.optional_size("n_inner")?.unwrap_or(4 * hidden_size),
        experts: None,
        num_layers,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: hidden_size.checked_div(num_heads).unwrap_or(0),
        latent: None,
        max_len: fields.size("n_positions")?,
        norm_eps: fields.not_negative("layer_norm_epsilon")?.unwrap_or(1e-5),
        activation: activation(fields, "activation_function", "gelu_new")?,
        rotary: None,
        windows: vec![None; num_layers],
        qkv_bias: true,
        out_bias: true,
        mlp_bias: true,
        qk_norm: false,
        tied: fields.flag("tie_word_embeddings", true)?,
        labels: None,
        dropout: DropoutConfig {
            embedding: fields.probability("embd_pdrop", 0.1)?,
            attention: fields.probability("attn_pdrop", 0.1)?,
            residual: fields.probability("resid_pdrop", 0.1)?,
        },
        initializer_range: fields.not_negative("initializer_range")?.unwrap_or(0.02),
        json: Map::new(),
        notes: Vec::new(),
    })
}
