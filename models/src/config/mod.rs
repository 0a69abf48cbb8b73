//! Model configuration, read from `config.json`.

mod bits;
mod deepseek;
mod experts;
mod fields;
mod gpt2;
mod labels;
mod llama;
mod rope;

use std::fmt;

use ops::{Gate, RotaryConfig};
use serde_json::{Map, Value};

use crate::digest::Hash;
use crate::{Error, Result};

pub(crate) use bits::FIELD as BITS_FIELD;
pub use deepseek::LatentConfig;
pub use experts::{ExpertsConfig, SigmoidConfig};
pub(crate) use fields::Fields;
pub use labels::{LabelsConfig, Problem};

/// The largest number of weights: sums of their bytes, and products with few other numbers, can be counted.
const MOST_WEIGHTS: f64 = (1u64 << 50) as f64;

/// Supported model families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Llama 2 and 3, SmolLM2 and others of `model_type` "llama".
    Llama,
    /// `model_type` "mistral": Llama with a sliding window.
    Mistral,
    /// `model_type` "qwen2", also Qwen2.5: Llama with biases of queries, keys and values.
    Qwen2,
    /// `model_type` "qwen3": Llama with norms of queries and keys.
    Qwen3,
    /// `model_type` "mixtral": Mistral with experts.
    Mixtral,
    /// `model_type` "qwen2_moe": Qwen2 with experts, one of them shared.
    Qwen2Moe,
    /// `model_type` "qwen3_moe": Qwen3 with experts.
    Qwen3Moe,
    /// `model_type` "deepseek_v3": latent attention, and experts that are chosen by sigmoids in groups.
    DeepseekV3,
    /// `model_type` "gpt2".
    Gpt2,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 9] = [
        Self::Llama,
        Self::Mistral,
        Self::Mixtral,
        Self::Qwen2,
        Self::Qwen2Moe,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::DeepseekV3,
        Self::Gpt2,
    ];

    /// Returns the `model_type` of a configuration.
    pub(crate) fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Mixtral => "mixtral",
            Self::Qwen2Moe => "qwen2_moe",
            Self::Qwen3Moe => "qwen3_moe",
            Self::DeepseekV3 => "deepseek_v3",
            Self::Gpt2 => "gpt2",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

/// Model configuration, read from a `config.json` written by transformers 4 or 5.
///
/// # Which fields are accepted
/// - Fields that determine what the model computes are read. An unsupported value is an error that lists the supported
///   ones.
/// - Fields that have no effect here (ids of special tokens, `use_cache`, `transformers_version`, `torch_dtype` and the
///   like) are known by name and kept for saving.
/// - Dropout probabilities that only other families have are ignored; [`notes`](Self::notes) lists them.
/// - Any other field is an error, unless it is null, false or empty: it could change the results.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// Model family.
    pub family: Family,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Number of features of a token.
    pub hidden_size: usize,
    /// Width of the feed-forward layers without experts.
    pub intermediate_size: usize,
    /// Experts of the feed-forward layers; `None` for a model without.
    pub experts: Option<ExpertsConfig>,
    /// Number of blocks.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Number of features of a head of queries and keys.
    pub head_dim: usize,
    /// Latent attention; `None` for a model whose keys and values are projected from its features.
    pub latent: Option<LatentConfig>,
    /// Maximum length of a row, in tokens; of a packed one, that of a document.
    pub max_len: usize,
    /// Epsilon that norms add to the variance.
    pub norm_eps: f64,
    /// Activation of the feed-forward layers.
    pub activation: Gate,
    /// Rotary position embedding; `None` for GPT-2, which has learned positions.
    pub rotary: Option<RotaryConfig>,
    /// Sliding window of each block, in tokens; `None` is full causal attention.
    pub windows: Vec<Option<usize>>,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub out_bias: bool,
    /// Whether the feed-forward layers have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys go through a norm for each head.
    pub qk_norm: bool,
    /// Whether the head shares the embedding's weight.
    pub tied: bool,
    /// Labels that the head scores documents for; `None` for a language model, whose head predicts the next token.
    pub labels: Option<LabelsConfig>,
    /// Dropout probabilities in training.
    pub dropout: DropoutConfig,
    /// Standard deviation of newly initialized weights.
    pub initializer_range: f64,
    json: Map<String, Value>,
    notes: Vec<String>,
}

/// Dropout probabilities in training. Dropout is active only within [`RowKeys::scope`](ops::RowKeys::scope), which
/// `girandole::Parallel` opens when it trains.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DropoutConfig {
    /// Of the embedding output; GPT-2 only.
    pub embedding: f64,
    /// Of the attention weights.
    pub attention: f64,
    /// Of the attention and feed-forward outputs, before they are added; GPT-2 only.
    pub residual: f64,
}

impl ModelConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Text that is not a JSON object; [`Error::Architecture`], [`Error::Config`], [`Error::UnknownFields`].
    ///
    /// ```
    /// use models::ModelConfig;
    ///
    /// let text = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    ///     "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"}"#;
    /// let config = ModelConfig::from_json(text)?;
    /// assert_eq!((config.num_kv_heads, config.head_dim, config.tied), (4, 8, false));
    /// let error = ModelConfig::from_json(&text.replace("torch_dtype", "router_scale")).unwrap_err();
    /// assert!(error.to_string().contains("router_scale"));
    /// # Ok::<(), models::Error>(())
    /// ```
    pub fn from_json(text: &str) -> Result<Self> {
        let json: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| Error::Format { path: "config.json".into(), problem: error.to_string() })?;
        Self::from_map(json)
    }

    fn from_map(json: Map<String, Value>) -> Result<Self> {
        let got = json.get("model_type").unwrap_or(&Value::Null);
        let Some(family) = Family::ALL.into_iter().find(|family| got == family.model_type()) else {
            let supported = Family::ALL.map(Family::model_type).join(", ");
            return Err(match got {
                Value::Null => Error::Config {
                    file: "config.json",
                    field: "model_type".into(),
                    got: "missing".into(),
                    help: format!("supported are {supported}"),
                },
                got => Error::Architecture { got: got.to_string(), supported },
            });
        };
        let mut fields = Fields::of_model(family, &json);
        let mut config = match family {
            Family::Gpt2 => gpt2::read(&mut fields)?,
            Family::DeepseekV3 => deepseek::read(&mut fields)?,
            _ => llama::read(family, &mut fields)?,
        };
        config.labels = labels::read(&mut fields)?;
        // Their head has a weight of its own.
        config.tied &= config.labels.is_none();
        config.notes.extend(bits::read(&mut fields)?);
        config.notes.extend(fields.finish()?);
        config.json = json;
        config.validate()?;
        Ok(config)
    }

    fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("the hidden size", self.hidden_size),
            ("the width of feed-forward layers", self.intermediate_size),
            ("the number of layers", self.num_layers),
            ("the number of attention heads", self.num_heads),
            ("num_key_value_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("the number of positions", self.max_len),
        ];
        let refuse = |field: &str, got: usize, help: &str| {
            Err(Error::Config {
                file: "config.json",
                field: field.into(),
                got: got.to_string(),
                help: help.into(),
            })
        };
        let experts = self.experts.iter().flat_map(|experts| {
            let shared = experts.shared_width.map(|width| ("the width of the shared expert", width));
            [Some(("the width of experts", experts.width)), shared].into_iter().flatten()
        });
        let latent = self.latent.iter().flat_map(LatentConfig::sizes);
        if let Some((field, got)) =
            sizes.into_iter().chain(experts).chain(latent).find(|(_, size)| *size == 0)
        {
            return refuse(field, got, "it must be above 0");
        }
        // Keeps the sizes of weights from overflowing.
        if self.num_heads.saturating_mul(self.head_dim) > 1 << 31 {
            return refuse("head_dim", self.head_dim, "times the number of heads it must be at most 2^31");
        }
        if self.weights_at_most() > MOST_WEIGHTS {
            return Err(Error::Config {
                file: "config.json",
                field: "the number of weights that its sizes make".into(),
                got: format!("{:.1e}", self.weights_at_most()),
                help: "it must be at most 2^50, about 1.1e15".into(),
            });
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return refuse("num_key_value_heads", self.num_kv_heads, "it must divide num_attention_heads");
        }
        if self.windows.contains(&Some(0)) {
            return refuse("sliding_window", 0, "it must be above 0");
        }
        if let Some(rotary) = self.rotary.as_ref().filter(|rotary| !rotary.head_dim.is_multiple_of(2)) {
            let field = if self.latent.is_some() { "qk_rope_head_dim" } else { "head_dim" };
            return refuse(field, rotary.head_dim, "it must be even: rotary embedding turns pairs");
        }
        if self.family == Family::Gpt2 && self.head_dim * self.num_heads != self.hidden_size {
            return refuse("n_embd", self.hidden_size, "n_head must divide it");
        }
        Ok(())
    }

    /// Returns a number of weights that the model does not have more of, about those that it has; computed from sizes that need
    /// not be possible.
    fn weights_at_most(&self) -> f64 {
        let (hidden, width) = (self.hidden_size as f64, self.intermediate_size as f64);
        let heads = self.num_heads as f64 * self.head_dim.max(self.value_dim()) as f64;
        let latent = self.latent.iter().flat_map(LatentConfig::sizes);
        let latent = latent.map(|(_, size)| size as f64).sum::<f64>();
        let attention = 4.0 * (hidden + latent) * (heads + latent);
        let experts = self.experts.iter().map(|experts| {
            let all = experts.count as f64 * (experts.width as f64 + 1.0);
            all + experts.shared_width.unwrap_or_default() as f64
        });
        let block = attention + 3.0 * hidden * (width + experts.sum::<f64>() + 2.0);
        let learned = if self.rotary.is_none() { self.max_len } else { 0 };
        let ends = 2.0 * self.vocab_size as f64 + learned as f64 + self.outputs() as f64;
        self.num_layers as f64 * block + hidden * ends
    }

    /// Returns the configuration with this probability for each dropout that the family has.
    ///
    /// # Errors
    /// A probability that is not from 0 to 1.
    pub fn with_dropout(mut self, p: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&p) {
            let (got, help) = (p.to_string(), "it must be a number from 0 to 1");
            return Err(Error::Invalid { what: "ModelConfig", field: "dropout", got, help });
        }
        self.dropout = match self.family {
            Family::Gpt2 => DropoutConfig { embedding: p, attention: p, residual: p },
            _ => DropoutConfig { attention: p, ..DropoutConfig::default() },
        };
        Ok(self)
    }

    /// Returns the number of features of a head of values.
    pub fn value_dim(&self) -> usize {
        self.latent.as_ref().map_or(self.head_dim, |latent| latent.value_dim)
    }

    /// Returns the number of outputs of the head: of tokens, or of labels.
    pub fn outputs(&self) -> usize {
        self.labels.as_ref().map_or(self.vocab_size, |labels| labels.names.len())
    }

    /// Returns the JSON as it was read; it is saved with the weights.
    pub fn json(&self) -> &Map<String, Value> {
        &self.json
    }

    /// Returns a hash of everything that determines what the model computes.
    pub fn fingerprint(&self) -> String {
        let mut computed =
            Self { json: Map::new(), notes: Vec::new(), initializer_range: 0.0, ..self.clone() };
        if let Some(experts) = &mut computed.experts {
            (experts.balance_coefficient, experts.is_balanced) = (0.0, false);
        }
        let mut hash = Hash::default();
        hash.add(format!("{computed:?}").as_bytes());
        hash.hex()
    }

    /// Returns the configuration with another note.
    pub(crate) fn noting(mut self, note: String) -> Self {
        self.notes.push(note);
        self
    }

    /// Returns one line for each part of the configuration that is not applied.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

#[cfg(test)]
mod tests;
