//! Names of parameters, their layout in files, and their initialization.

use candle_nn::Init;
use ops::quantized::Format;

use crate::{Family, ModelConfig};

/// The head's weight, where it is not tied to the embedding.
pub(crate) const HEAD: &str = "lm_head.weight";

/// A head that scores documents for labels, and its weight.
pub(crate) const SCORE_MODULE: &str = "score";
pub(crate) const SCORE: &str = "score.weight";

/// Parameter names of a model family.
pub(crate) struct Names {
    /// Prefix of all names except the head's.
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

/// Names within a block with experts.
pub(crate) struct ExpertNames {
    /// The feed-forward layer.
    pub(crate) block: &'static str,
    /// The matrices of an expert.
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// The expert that all tokens use.
    pub(crate) shared: &'static str,
    /// What the output of that one is multiplied by, if it is.
    pub(crate) shared_gate: Option<&'static str>,
}

pub(crate) fn of_experts(family: Family) -> ExpertNames {
    let qwen = ExpertNames {
        block: "mlp",
        gate: "gate_proj",
        up: "up_proj",
        down: "down_proj",
        shared: "shared_expert",
        shared_gate: Some("shared_expert_gate"),
    };
    match family {
        Family::Mixtral => {
            ExpertNames { block: "block_sparse_moe", gate: "w1", up: "w3", down: "w2", ..qwen }
        }
        Family::DeepseekV3 => ExpertNames { shared: "shared_experts", shared_gate: None, ..qwen },
        _ => qwen,
    }
}

impl Names {
    /// Returns the name of the embedding's weight.
    pub(crate) fn embedding(&self) -> String {
        format!("{}.{}.weight", self.base, self.embedding)
    }
}

impl ModelConfig {
    /// Returns the names of tied parameters, in pairs: only the first of a pair is saved. A pipeline has both, see
    /// `PipelineConfig::tied`.
    pub fn ties(&self) -> Vec<(String, String)> {
        match self.tied {
            true => vec![(of(self.family).embedding(), HEAD.into())],
            false => Vec::new(),
        }
    }
}

/// Part of the names of all tensors of experts.
const EXPERTS: &str = ".experts.";

/// Whether a parameter belongs to one of several experts.
pub(crate) fn is_of_expert(name: &str) -> bool {
    name.contains(EXPERTS)
}

/// Names of the weights of a layer's experts where all experts are one tensor, as in `transformers` 5: gate and up, and down. Adapters
/// of an expert have these names, too, after its number.
pub(crate) const JOINED: [&str; 2] = ["gate_up_proj", "down_proj"];

/// What belongs to one of several experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OfExpert<'a> {
    /// The layer that has the experts: `model.layers.0.mlp`.
    pub(crate) layer: &'a str,
    /// The expert's number.
    pub(crate) expert: usize,
    /// The rest of the name: `gate_proj.weight`.
    pub(crate) rest: &'a str,
}

impl<'a> OfExpert<'a> {
    /// Takes a name apart; `None` if it is not that of an expert's parameter.
    pub(crate) fn of(name: &'a str) -> Option<Self> {
        let (layer, rest) = name.split_once(EXPERTS)?;
        let (expert, rest) = rest.split_once('.')?;
        Some(Self { layer, expert: expert.parse().ok()?, rest })
    }

    /// The same of another expert, and another rest.
    pub(crate) fn with(&self, expert: usize, rest: &str) -> String {
        format!("{}{EXPERTS}{expert}.{rest}", self.layer)
    }

    /// The name of the layer in `transformers` 5, whatever the model's files have.
    pub(crate) fn joined_layer(&self) -> String {
        let mixtrals = of_experts(Family::Mixtral).block;
        self.layer.strip_suffix(mixtrals).map_or(self.layer.into(), |before| format!("{before}mlp"))
    }

    /// The name without a number: that of a parameter of all experts, as targets of adapters have it.
    pub(crate) fn of_all(&self) -> String {
        format!("{}{EXPERTS}{}", self.joined_layer(), self.rest)
    }
}

/// Whether files store a weight as (inputs, outputs), as GPT-2's `Conv1D` does, where the model has (outputs, inputs).
pub(crate) fn is_transposed(family: Family, name: &str) -> bool {
    const TURNED: [&str; 4] =
        [".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight"];
    family == Family::Gpt2 && TURNED.iter().any(|end| name.ends_with(end))
}

/// Whether files may contain a tensor that the model does not have: a buffer of older files, or one of the layers after the last, which
/// predict further tokens.
pub(crate) fn is_ignored(config: &ModelConfig, name: &str) -> bool {
    let buffers = [".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"];
    let next = format!("model.layers.{}.", config.num_layers);
    buffers.iter().any(|end| name.ends_with(end))
        || (config.family == Family::DeepseekV3 && name.starts_with(&next))
}

/// Whether a tensor is saved in 32 bits at least, as transformers has it in memory: the correction of a router, which is kept so, too,
/// and the router of DeepSeek V3, whose scores are computed so.
pub(crate) fn is_wide(family: Family, name: &str) -> bool {
    name.ends_with(&format!(".{}", ops::EXPERT_CORRECTION))
        || (family == Family::DeepseekV3 && name.ends_with(".mlp.gate.weight"))
}

/// Returns the initialization of a new parameter, as in transformers.
pub(crate) fn init(config: &ModelConfig, name: &str, dims: &[usize]) -> Init {
    if dims.len() < 2 {
        // Weights of norms, and biases.
        return Init::Const(if name.ends_with("weight") { 1.0 } else { 0.0 });
    }
    let stdev = match config.family == Family::Gpt2 && name.ends_with(".c_proj.weight") {
        // Output projections to the residual stream, of which each block has two.
        true => config.initializer_range / (2.0 * config.num_layers as f64).sqrt(),
        false => config.initializer_range,
    };
    Init::Randn { mean: 0.0, stdev }
}

/// Part of the names of a linear layer's weight in few bits, appended to the layer's name: `weight`, its blocks, and `scales`.
pub(crate) fn quantized(format: Format) -> &'static str {
    match format {
        Format::Nf4 => "nf4",
        Format::Nf4Wide => "nf4_wide",
        _ => "int8",
    }
}

/// Part of the names of the scales of a weight in few bits.
pub(crate) const SCALES: &str = "scales";

/// Formats of weights in few bits.
pub(crate) const FORMATS: [Format; 3] = [Format::Nf4, Format::Nf4Wide, Format::Int8];

/// Names of the two matrices of an adapter, appended to the layer's name.
pub(crate) const ADAPTER: [&str; 2] = ["lora_A", "lora_B"];

/// Name of the magnitudes of an adapter with weight decomposition (DoRA), appended to the layer's name.
pub(crate) const MAGNITUDE: &str = "lora_magnitude_vector";

/// Initialization of magnitudes that are the norms of the rows of the layer's weight, or of its weight as few bits hold it. candle's
/// `Init` has no such thing: a source of weights that does not know these gives numbers that no model can compute with.
pub(crate) fn magnitude_init(format: Option<Format>) -> Init {
    Init::Const(match format {
        None => f64::NAN,
        Some(Format::Nf4 | Format::Nf4Wide) => f64::INFINITY,
        Some(_) => f64::NEG_INFINITY,
    })
}

/// The inverse of [`magnitude_init`].
pub(crate) fn format_of_magnitudes(init: Init) -> Option<Format> {
    let number = |init: Init| if let Init::Const(number) = init { number } else { f64::NAN };
    FORMATS.into_iter().find(|format| number(magnitude_init(Some(*format))) == number(init))
}

/// Whether a parameter belongs to an adapter.
pub(crate) fn is_adapter(name: &str) -> bool {
    name.strip_suffix(MAGNITUDE).is_some_and(|layer| layer.ends_with('.'))
        || ADAPTER.iter().any(|part| name.ends_with(&format!(".{part}.weight")))
}

/// Returns the names of the parameters of a layer's adapter, if it has all of them.
pub(crate) fn of_adapter(layer: &str) -> [String; 3] {
    let [a, b] = ADAPTER.map(|part| format!("{layer}.{part}.weight"));
    [a, b, format!("{layer}.{MAGNITUDE}")]
}

/// Prefix of parameter names in `peft`'s files.
pub(crate) const PEFT_PREFIX: &str = "base_model.model.";

/// Returns the initialization of a new adapter parameter, as in peft: the first matrix like PyTorch's linear layers,
/// the second zeros, so that the adapter initially has no effect. `None` if the name is not an adapter's.
pub(crate) fn adapter_init(name: &str, dims: &[usize]) -> Option<Init> {
    let [a, b] = ADAPTER.map(|part| name.ends_with(&format!(".{part}.weight")));
    let bound = 1.0 / (dims.last().copied().unwrap_or(1).max(1) as f64).sqrt();
    match (a, b) {
        (true, _) => Some(Init::Uniform { lo: -bound, up: bound }),
        (_, true) => Some(Init::Const(0.0)),
        _ => None,
    }
}
