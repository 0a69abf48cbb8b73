//! What parameters are called, and how files have them.

use candle_nn::Init;

use crate::{Family, ModelConfig};

/// The head's own weight, where it is not the embedding.
pub(crate) const HEAD: &str = "lm_head.weight";

/// The names of a kind of model.
pub(crate) struct Names {
    /// What all but the head lies in.
    pub(crate) base: &'static str,
    pub(crate) embedding: &'static str,
    pub(crate) blocks: &'static str,
    pub(crate) norm: &'static str,
}

pub(crate) fn of(family: Family) -> Names {
    match family {
        Family::Gpt2 => Names { base: "transformer", embedding: "wte", blocks: "h", norm: "ln_f" },
        _ => Names { base: "model", embedding: "embed_tokens", blocks: "layers", norm: "norm" },
    }
}

impl Names {
    /// The embedding's weight.
    pub(crate) fn embedding(&self) -> String {
        format!("{}.{}.weight", self.base, self.embedding)
    }
}

/// Whether files have a weight with inputs before outputs (GPT-2's `Conv1D`), where the model has outputs before inputs.
pub(crate) fn is_transposed(family: Family, name: &str) -> bool {
    const TURNED: [&str; 4] =
        [".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight"];
    family == Family::Gpt2 && TURNED.iter().any(|end| name.ends_with(end))
}

/// A tensor that older files have and that is no parameter.
pub(crate) fn is_buffer(name: &str) -> bool {
    [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"].iter().any(|end| name.ends_with(end))
}

/// What a new parameter is drawn from, as in transformers.
pub(crate) fn init(config: &ModelConfig, name: &str, dims: &[usize]) -> Init {
    if dims.len() < 2 {
        // Weights of norms, and biases.
        return Init::Const(if name.ends_with("weight") { 1.0 } else { 0.0 });
    }
    let stdev = match config.family == Family::Gpt2 && name.ends_with(".c_proj.weight") {
        // What two layers of each block add to the rest.
        true => config.initializer_range / (2.0 * config.num_layers as f64).sqrt(),
        false => config.initializer_range,
    };
    Init::Randn { mean: 0.0, stdev }
}

/// What the parts of an adapter are called, after the name of its layer.
pub(crate) const ADAPTER: [&str; 2] = ["lora_A", "lora_B"];

/// What a new parameter of an adapter is drawn from, as in peft: the first as PyTorch's linear layers, the second zeros, so that the
/// adapter changes nothing at first.
pub(crate) fn adapter_init(name: &str, dims: &[usize]) -> Option<Init> {
    let [a, b] = ADAPTER.map(|part| name.ends_with(&format!(".{part}.weight")));
    let bound = 1.0 / (dims.last().copied().unwrap_or(1).max(1) as f64).sqrt();
    match (a, b) {
        (true, _) => Some(Init::Uniform { lo: -bound, up: bound }),
        (_, true) => Some(Init::Const(0.0)),
        _ => None,
    }
}
