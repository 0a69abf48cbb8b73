//! The configuration that a GGUF file's metadata says, as `config.json` would.

use ops::{RotaryConfig, RotaryScaling};
use serde_json::{Map, Value as Json, json};

use super::llama3_factors;
use crate::gguf_file::Content;
use crate::{Error, Family, Result};

/// Keys after the architecture's name that change nothing here.
const HARMLESS: [&str; 8] = [
    "vocab_size", "tensor_data_layout", "rope.dimension_count", "rope.scaling.finetuned",
    "attention.key_length_mla", "pooling_type", "expert_shared_count", "attention.max_position_embeddings",
];

/// The factors by which frequencies are divided.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Returns the family of a file's architecture.
fn family(content: &Content) -> Result<Family> {
    let arch = architecture(content)?;
    let has_experts = content.size(&format!("{arch}.expert_count"))?.is_some_and(|count| count > 0);
    Ok(match arch {
        "llama" if has_experts => Family::Mixtral,
        "llama" => Family::Llama,
        "qwen2" => Family::Qwen2,
        "qwen2moe" => Family::Qwen2Moe,
        "qwen3" => Family::Qwen3,
        "qwen3moe" => Family::Qwen3Moe,
        "gpt2" => Family::Gpt2,
        other => {
            return Err(content.refuse(format!(
                "its architecture is {other:?}; supported are llama, qwen2, qwen2moe, qwen3, qwen3moe and gpt2: give the model's folder"
            )));
        }
    })
}

/// Checks that a model's file is of a known architecture; files of a vocabulary alone are of none.
pub(super) fn check_architecture(content: &Content) -> Result<()> {
    let is_model = content.text("general.type")?.is_none_or(|kind| kind == "model");
    match is_model && content.text("general.architecture")?.is_some() {
        true => family(content).map(drop),
        false => Ok(()),
    }
}

fn architecture(content: &Content) -> Result<&str> {
    if content.text("general.type")?.is_some_and(|kind| kind != "model") {
        return Err(
            content.refuse("it has adapters or a vocabulary, and no model: give the model's file".into())
        );
    }
    if content.size("split.count")?.is_some_and(|count| count > 1) {
        let problem = "it is one part of several: `llama-gguf-split --merge` makes one file of them";
        return Err(content.refuse(problem.into()));
    }
    let arch = content.text("general.architecture")?;
    arch.ok_or_else(|| content.refuse("it has no general.architecture: it is no model's file".into()))
}

/// The values of one architecture.
struct Values<'a> {
    content: &'a Content,
    arch: &'a str,
}

impl Values<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn optional(&self, name: &str) -> Result<Option<usize>> {
        self.content.size(&self.key(name))
    }

    fn size(&self, name: &str) -> Result<usize> {
        let missing = || self.content.refuse(format!("it has no {}", self.key(name)));
        self.optional(name)?.ok_or_else(missing)
    }

    fn required_number(&self, name: &str) -> Result<f64> {
        let missing = || self.content.refuse(format!("it has no {}", self.key(name)));
        self.number(name)?.ok_or_else(missing)
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        self.content.number(&self.key(name))
    }

    /// Whether there is a tensor, in the first block or outside of blocks.
    fn has(&self, tensor: &str) -> bool {
        self.content.tensors.contains_key(tensor)
    }

    fn refuse_other(&self, name: &str, number: Option<f64>, supported: f64) -> Result<()> {
        match number.filter(|number| *number != supported) {
            None => Ok(()),
            Some(number) => {
                Err(self.content.refuse(format!("{} is {number}; supported is {supported}", self.key(name))))
            }
        }
    }
}

/// Returns what `config.json` would have.
pub(super) fn config(content: &Content) -> Result<Map<String, Json>> {
    let (family, arch) = (family(content)?, architecture(content)?);
    let values = Values { content, arch };
    let mut all = match family {
        Family::Gpt2 => gpt2(&values)?,
        _ => llama(family, &values)?,
    };
    all.insert("model_type".into(), family.model_type().into());
    all.insert("architectures".into(), json!([class(family)]));
    let embedding = content.tensors.get("token_embd.weight");
    let missing = || content.refuse("it has no tensor token_embd.weight".into());
    let rows = embedding.and_then(|embedding| embedding.dims.first()).ok_or_else(missing)?;
    all.insert("vocab_size".into(), (*rows).into());
    for (key, field) in [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")] {
        let id = content.size(&format!("tokenizer.ggml.{key}_token_id"))?;
        id.into_iter().for_each(|id| drop(all.insert(field.into(), id.into())));
    }
    for name in HARMLESS {
        content.value(&values.key(name));
    }
    match content.unasked(&format!("{arch}.")) {
        None => Ok(all),
        Some((key, value)) => Err(content.refuse(format!(
            "{key} is {value}, which is not known here, and could change what the model computes: give the model's folder"
        ))),
    }
}

/// The class of a family in transformers.
fn class(family: Family) -> &'static str {
    match family {
        Family::Llama => "LlamaForCausalLM",
        Family::Mistral => "MistralForCausalLM",
        Family::Mixtral => "MixtralForCausalLM",
        Family::Qwen2 => "Qwen2ForCausalLM",
        Family::Qwen2Moe => "Qwen2MoeForCausalLM",
        Family::Qwen3 => "Qwen3ForCausalLM",
        Family::Qwen3Moe => "Qwen3MoeForCausalLM",
        Family::DeepseekV3 => "DeepseekV3ForCausalLM",
        Family::Gpt2 => "GPT2LMHeadModel",
    }
}

fn map(json: Json) -> Map<String, Json> {
    match json {
        Json::Object(map) => map,
        _ => Map::new(),
    }
}

fn gpt2(values: &Values<'_>) -> Result<Map<String, Json>> {
    let heads = values.size("attention.head_count")?;
    let of_keys = values.number("attention.head_count_kv")?;
    values.refuse_other("attention.head_count_kv", of_keys, heads as f64)?;
    Ok(map(json!({
        "n_embd": values.size("embedding_length")?,
        "n_head": heads,
        "n_layer": values.size("block_count")?,
        "n_positions": values.size("context_length")?,
        "n_inner": values.size("feed_forward_length")?,
        "layer_norm_epsilon": values.required_number("attention.layer_norm_epsilon")?,
        "tie_word_embeddings": values.content.is_tied()?,
    })))
}

fn llama(family: Family, values: &Values<'_>) -> Result<Map<String, Json>> {
    let (heads, hidden) = (values.size("attention.head_count")?, values.size("embedding_length")?);
    let length = values.optional("attention.key_length")?;
    let head_dim = length.unwrap_or_else(|| hidden.checked_div(heads).unwrap_or_default());
    let value_length = values.optional("attention.value_length")?.map(|length| length as f64);
    values.refuse_other("attention.value_length", value_length, head_dim as f64)?;
    let rotated = values.optional("rope.dimension_count")?.map(|length| length as f64);
    values.refuse_other("rope.dimension_count", rotated, head_dim as f64)?;
    let max_len = values.size("context_length")?;
    let theta = values.number("rope.freq_base")?.unwrap_or(1e4);
    let width = values.optional("feed_forward_length")?;
    let mut all = map(json!({
        "hidden_size": hidden,
        "intermediate_size": width.map_or_else(|| values.size("expert_feed_forward_length"), Ok)?,
        "num_hidden_layers": values.size("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": values.optional("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_len,
        "rms_norm_eps": values.required_number("attention.layer_norm_rms_epsilon")?,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": values.content.is_tied()?,
    }));
    if let Some(scaling) = scaling(values, head_dim, theta, max_len)? {
        all.insert("rope_scaling".into(), scaling);
    }
    if family == Family::Llama {
        all.insert("attention_bias".into(), values.has("blk.0.attn_q.bias").into());
        all.insert("mlp_bias".into(), values.has("blk.0.ffn_gate.bias").into());
    }
    if !matches!(family, Family::Mixtral | Family::Qwen2Moe | Family::Qwen3Moe) {
        // Files of models without experts may say so.
        for name in ["expert_count", "expert_used_count"] {
            values.optional(name)?;
        }
        return Ok(all);
    }
    let count = values.size("expert_count")?;
    all.insert("num_experts".into(), count.into());
    all.insert("num_experts_per_tok".into(), values.size("expert_used_count")?.into());
    let width = values.optional("expert_feed_forward_length")?;
    let scale = values.number("expert_weights_scale")?;
    values.refuse_other("expert_weights_scale", scale, 1.0)?;
    let is_normalized = values.content.flag(&values.key("expert_weights_norm"))?;
    if family == Family::Mixtral {
        let count = all.remove("num_experts");
        count.into_iter().for_each(|count| drop(all.insert("num_local_experts".into(), count)));
        all.insert("sliding_window".into(), Json::Null);
        return Ok(all);
    }
    let of = |tensor: &str| values.content.tensors.get(tensor)?.dims.iter().rev().nth(1).copied();
    let width = width.or_else(|| of("blk.0.ffn_gate_exps.weight"));
    all.insert("moe_intermediate_size".into(), width.into());
    all.insert("norm_topk_prob".into(), is_normalized.unwrap_or(family == Family::Qwen3Moe).into());
    if family == Family::Qwen2Moe {
        let shared = values.optional("expert_shared_feed_forward_length")?;
        let shared = shared.or_else(|| of("blk.0.ffn_gate_shexp.weight"));
        all.insert("shared_expert_intermediate_size".into(), shared.into());
    }
    Ok(all)
}

/// Returns `rope_scaling`; `None` without scaling.
fn scaling(values: &Values<'_>, head_dim: usize, theta: f64, max_len: usize) -> Result<Option<Json>> {
    let content = values.content;
    let kind = content.text(&values.key("rope.scaling.type"))?.unwrap_or("none");
    let factor = values.number("rope.scaling.factor")?;
    let original = values.optional("rope.scaling.original_context_length")?;
    for (name, supported) in [
        ("attn_factor", 1.0),
        ("yarn_attn_factor", 1.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_beta_fast", 32.0),
        ("yarn_beta_slow", 1.0),
    ] {
        let name = format!("rope.scaling.{name}");
        let number = values.number(&name)?;
        values.refuse_other(&name, number, supported)?;
    }
    let factors = content.tensors.contains_key(ROPE_FACTORS);
    Ok(match (kind, factor) {
        ("none" | "linear", None | Some(1.0)) if !factors => None,
        ("none", None | Some(1.0)) => Some(llama3(content, head_dim, theta, max_len)?),
        ("linear", Some(factor)) if !factors => Some(json!({ "rope_type": "linear", "factor": factor })),
        ("yarn", Some(factor)) if !factors => Some(json!({
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original.unwrap_or(max_len)
        })),
        _ => {
            let tensor = if factors { format!(" with {ROPE_FACTORS}") } else { String::new() };
            let factor = factor.map_or_else(|| "none".into(), |factor| factor.to_string());
            return Err(content.refuse(format!(
                "rope.scaling.type is {kind} with a factor of {factor}{tensor}; supported are none, linear and yarn, and the factors of Llama 3"
            )));
        }
    })
}

/// Returns the scaling of Llama 3 that divides frequencies by the factors of the file. Those of several configurations are the same:
/// `low_freq_factor` is 1.
fn llama3(content: &Content, head_dim: usize, theta: f64, max_len: usize) -> Result<Json> {
    let found: Vec<f32> = content.read(ROPE_FACTORS)?.to_vec1()?;
    // Before so many factors are computed as the head's width, which may be any number, asks for.
    if found.len() != head_dim / 2 {
        return Err(content.refuse(format!(
            "{ROPE_FACTORS} has {} factors, and a head of {head_dim} features has {}",
            found.len(),
            head_dim / 2
        )));
    }
    let factor = f64::from(found.iter().copied().fold(1.0, f32::max));
    let is_same = |high: f64, original: usize| {
        let scaling = RotaryScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: high,
            original_max_len: original,
        };
        let config = RotaryConfig { theta, scaling, ..RotaryConfig::new(head_dim, max_len) };
        let factors = llama3_factors(&config).unwrap_or_default();
        factors.iter().zip(&found).all(|(a, b)| (a - b).abs() <= 2e-6 * b)
    };
    let lengths = (3..21).rev().map(|power| 1 << power).chain([(max_len as f64 / factor) as usize]);
    let known = lengths.flat_map(|original| [(4.0, original), (2.0, original), (8.0, original)]);
    match known.into_iter().find(|(high, original)| is_same(*high, *original)) {
        Some((high, original)) => Ok(json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
            "original_max_position_embeddings": original
        })),
        None => Err(content.refuse(format!(
            "the factors of {ROPE_FACTORS} are not those of a Llama 3: give the model's folder"
        ))),
    }
}

/// Reads the fields that a model is made of from `config.json` of a file.
pub(super) fn text(content: &Content) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(&config(content)?)
        .map_err(|error: serde_json::Error| -> Error { content.refuse(error.to_string()) })
}
