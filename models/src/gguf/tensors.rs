//! Which tensors a GGUF file of a model has, and of which parameters each is made.

use std::collections::BTreeMap;

use ops::{RotaryConfig, RotaryScaling};

use super::metadata::architecture;
use crate::names::{self, ADAPTER};
use crate::{Error, Lora, ModelConfig, Result, Weights};

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
const ROUTER: &str = "ffn_gate_inp";
const SHARED_GATE: &str = "ffn_gate_inp_shexp";
const POSITIONS: &str = "position_embd";

/// A tensor to write.
#[derive(Debug)]
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) source: Source,
    /// Whether it is f32 whatever the matrices are.
    pub(super) is_exact: bool,
}

/// What a tensor is made of.
#[derive(Debug)]
pub(super) enum Source {
    /// A parameter; `rotated_heads` is the number of heads whose rows are reordered so that rotated pairs are adjacent.
    Parameter { name: String, rotated_heads: Option<usize> },
    /// The matrices of all experts of a layer, in their order.
    Experts(Vec<String>),
    /// Numbers that are no parameter.
    Numbers(Vec<f32>),
}

/// The matrices of a layer's experts, of one kind.
#[derive(Debug, Default)]
struct Matrices {
    /// Of each of them.
    dims: Vec<usize>,
    /// Of each expert.
    names: BTreeMap<usize, String>,
}

/// Returns all tensors of a model, block by block.
pub(super) fn of_model(weights: &Weights) -> Result<Vec<TensorPlan>> {
    let config = weights.config();
    let mut all = Vec::new();
    let factors = config.rotary.as_ref().and_then(llama3_factors);
    all.extend(factors.map(|factors| TensorPlan {
        name: "rope_freqs.weight".into(),
        dims: vec![factors.len()],
        source: Source::Numbers(factors),
        is_exact: true,
    }));
    let mut experts: BTreeMap<String, Matrices> = BTreeMap::new();
    for (name, dims) in weights.shapes() {
        if let Some((of_all, expert)) = of_expert(config, name) {
            let matrices = experts.entry(of_all).or_default();
            matrices.dims.clone_from(dims);
            matrices.names.insert(expert, name.clone());
            continue;
        }
        let Some(in_file) = name_of(config, name) else {
            return Err(Error::Format {
                path: "config.json".into(),
                problem: format!("GGUF has no name for the parameter {name}"),
            });
        };
        let is_exact =
            [ROUTER, SHARED_GATE, POSITIONS].iter().any(|part| in_file.contains(&format!("{part}.")));
        let dims = if in_file.contains(SHARED_GATE) { vec![dims.iter().product()] } else { dims.clone() };
        let source = Source::Parameter { name: name.clone(), rotated_heads: rotated_heads(config, name) };
        all.push(TensorPlan { name: in_file, dims, source, is_exact });
    }
    for (name, Matrices { dims, names }) in experts {
        let dims = [&[names.len()], dims.as_slice()].concat();
        let source = Source::Experts(names.into_values().collect());
        all.push(TensorPlan { name, dims, source, is_exact: false });
    }
    Ok(all)
}

/// Returns all tensors of adapters.
pub(super) fn of_adapters(config: &ModelConfig, lora: &Lora) -> Result<Vec<TensorPlan>> {
    let plan = |(name, dims): (&String, &Vec<usize>)| {
        let found = ADAPTER
            .into_iter()
            .enumerate()
            .find_map(|(place, part)| Some((place, name.strip_suffix(&format!("{part}.weight"))?)));
        let of_layer = |layer: &str| name_of(config, &format!("{layer}weight"));
        let Some((place, in_file, layer)) =
            found.and_then(|(place, layer)| Some((place, of_layer(layer)?, layer)))
        else {
            let problem =
                format!("a GGUF file of adapters cannot have {name}: merge them into the model instead");
            return Err(Error::Format { path: "adapter_config.json".into(), problem });
        };
        // Rows of the second matrix are outputs.
        let rotated_heads = if place == 1 { rotated_heads(config, &format!("{layer}weight")) } else { None };
        let name = format!("{in_file}.{}", ["lora_a", "lora_b"][place]);
        let source = Source::Parameter { name: format!("{layer}{}.weight", ADAPTER[place]), rotated_heads };
        Ok(TensorPlan { name, dims: dims.clone(), source, is_exact: true })
    };
    lora.shapes().iter().map(plan).collect()
}

/// Returns the name of a parameter in a file.
pub(super) fn name_of(config: &ModelConfig, name: &str) -> Option<String> {
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
pub(super) fn of_expert(config: &ModelConfig, name: &str) -> Option<(String, usize)> {
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
pub(super) fn rotated_heads(config: &ModelConfig, name: &str) -> Option<usize> {
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
pub(super) fn llama3_factors(rotary: &RotaryConfig) -> Option<Vec<f32>> {
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
