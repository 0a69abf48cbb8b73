//! What a family and its parameters are called in a GGUF file.

use ops::{RotaryConfig, RotaryScaling};

use crate::{Family, ModelConfig, names};

/// Names within a block, here and in a GGUF file, without `weight` and `bias`.
const IN_BLOCK: [(&str, &str); 23] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", ROUTER),
    ("block_sparse_moe.gate", ROUTER),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", SHARED_GATE),
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
];
pub(crate) const ROUTER: &str = "ffn_gate_inp";
pub(crate) const SHARED_GATE: &str = "ffn_gate_inp_shexp";
pub(crate) const POSITIONS: &str = "position_embd";

/// The name of a family's architecture.
pub(crate) fn architecture(family: Family) -> &'static str {
    match family {
        Family::Llama | Family::Mistral | Family::Mixtral => "llama",
        Family::Qwen2 => "qwen2",
        Family::Qwen3 => "qwen3",
        Family::Qwen2Moe => "qwen2moe",
        Family::Qwen3Moe => "qwen3moe",
        Family::DeepseekV3 => "deepseek2",
        Family::Gpt2 => "gpt2",
    }
}

/// Returns the name of a parameter in a file.
pub(crate) fn name_of(config: &ModelConfig, name: &str) -> Option<String> {
    let names = names::of(config.family);
    let (layer, end) = name.rsplit_once('.')?;
    if layer == "lm_head" {
        return Some(format!("output.{end}"));
    }
    let rest = layer.strip_prefix(names.base)?.strip_prefix('.')?;
    if let Some((place, rest)) =
        rest.strip_prefix(names.blocks).and_then(|rest| rest.strip_prefix('.')?.split_once('.'))
    {
        let (_, in_file) = IN_BLOCK.iter().find(|(known, _)| *known == rest)?;
        return Some(format!("blk.{place}.{in_file}.{end}"));
    }
    let in_file = match rest {
        rest if rest == names.embedding => "token_embd",
        rest if rest == names.norm => "output_norm",
        "wpe" => POSITIONS,
        _ => return None,
    };
    Some(format!("{in_file}.{end}"))
}

/// Returns the name of the tensor of all experts, and the number of the expert whose parameter this is.
pub(crate) fn of_expert(config: &ModelConfig, name: &str) -> Option<(String, usize)> {
    let (before, after) = name.split_once(".experts.")?;
    let (expert, matrix) = after.strip_suffix(".weight")?.split_once('.')?;
    let of = names::of_experts(config.family);
    let matrix = match matrix {
        matrix if matrix == of.gate => "gate",
        matrix if matrix == of.up => "up",
        matrix if matrix == of.down => "down",
        _ => return None,
    };
    let block = before.strip_prefix("model.layers.")?.split_once('.')?.0;
    Some((format!("blk.{block}.ffn_{matrix}_exps.weight"), expert.parse().ok()?))
}

/// Returns the number of heads, if the parameter's rows are reordered.
pub(crate) fn rotated_heads(config: &ModelConfig, name: &str) -> Option<usize> {
    if architecture(config.family) != "llama" {
        return None;
    }
    let (layer, _) = name.rsplit_once('.')?;
    match layer.rsplit_once('.')?.1 {
        "q_proj" => Some(config.num_heads),
        "k_proj" => Some(config.num_kv_heads),
        _ => None,
    }
}

/// Returns the numbers by which the frequencies of Llama 3's longer context are divided, one for each pair; `None` with another
/// scaling.
pub(crate) fn llama3_factors(rotary: &RotaryConfig) -> Option<Vec<f32>> {
    let RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_len } =
        rotary.scaling
    else {
        return None;
    };
    let original = original_max_len as f64;
    let of_pair = |pair: usize| {
        let frequency = rotary.theta.powf(-2.0 * pair as f64 / rotary.head_dim as f64);
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
        let smooth = smooth.clamp(0.0, 1.0);
        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
    };
    Some((0..rotary.head_dim / 2).map(of_pair).collect())
}
