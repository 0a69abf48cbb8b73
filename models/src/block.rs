//! Transformer block: attention and feed-forward, each after a norm and added to its input (pre-norm residual block).

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::ModuleT;
use candle_nn::kv_cache::Cache as Kept;
use ops::tape::add;
use ops::{
    AttentionConfig, AttentionMask, Dropout, LayerNorm, RmsNorm, RowContext, attention, columns, layer_norm,
    rms_norm,
};
use training::build::{Division, Layers, Linear, LinearConfig, Part};

use crate::experts::SparseFeedForward;
use crate::feed_forward::FeedForward;
use crate::latent::LatentProjections;
use crate::names;
use crate::rotary::Positions;
use crate::{ExpertsConfig, Family, ModelConfig};

/// RMS norm or layer norm, by model family.
#[derive(Debug)]
pub(crate) enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    pub(crate) fn new(config: &ModelConfig, part: &Part) -> Result<Self> {
        let (size, eps) = (config.hidden_size, config.norm_eps);
        Ok(match config.family {
            Family::Gpt2 => Self::Layer(layer_norm(size, eps, part.whole())?),
            _ => Self::Rms(rms_norm(size, eps, part.whole())?),
        })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }
}

/// Key-value cache of one block.
#[derive(Debug)]
pub(crate) struct KvCache {
    keys: Kept,
    values: Kept,
}

impl KvCache {
    pub(crate) fn new() -> Self {
        /// Positions by which the cache grows.
        const STEP: usize = 256;
        Self { keys: Kept::new(1, STEP), values: Kept::new(1, STEP) }
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.current_seq_len()
    }

    /// Appends the keys and values of new tokens; returns those of all tokens.
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<[Tensor; 2]> {
        let mut all = [(&mut self.keys, k), (&mut self.values, v)].into_iter().map(|(kept, new)| {
            kept.append(&new.detach().contiguous()?)?;
            kept.current_data()?.ok_or_else(|| candle_core::Error::Msg("an empty cache".into()))
        });
        match (all.next(), all.next()) {
            (Some(k), Some(v)) => Ok([k?, v?]),
            _ => candle_core::bail!("a cache without keys or values"),
        }
    }
}

/// Projections to queries, keys and values: three layers, one fused layer, or through latent features.
enum Projections {
    Apart([Linear; 3]),
    Together(Linear),
    Latent(Box<LatentProjections>),
}

impl Projections {
    /// Makes them, of these widths, and the projection of attention's output.
    fn new(
        config: &ModelConfig,
        widths: [usize; 3],
        positions: Option<&Positions>,
        part: &Part,
    ) -> Result<(Self, Linear)> {
        let hidden = config.hidden_size;
        let linear = |name: &str, linear: LinearConfig| part.pp(name).linear(&linear);
        let into = |width| LinearConfig::new(hidden, width, Division::Outputs).with_bias(config.qkv_bias);
        let out = config.num_heads * config.value_dim();
        let from = LinearConfig::new(out, hidden, Division::Inputs).with_bias(config.out_bias);
        Ok(match (&config.latent, positions, config.family) {
            (Some(latent), Some(positions), _) => {
                let all = LatentProjections::new(config, latent, positions, part)?;
                (Self::Latent(Box::new(all)), linear("o_proj", from)?)
            }
            (.., Family::Gpt2) => {
                let all = LinearConfig { groups: 3, ..into(widths.iter().sum()) };
                (Self::Together(linear("c_attn", all)?), linear("c_proj", from)?)
            }
            _ => {
                let [q, k, v] = ["q_proj", "k_proj", "v_proj"];
                let apart =
                    [linear(q, into(widths[0]))?, linear(k, into(widths[1]))?, linear(v, into(widths[2]))?];
                (Self::Apart(apart), linear("o_proj", from)?)
            }
        })
    }
}

struct SelfAttention {
    projections: Projections,
    /// Per-head norms of queries and of keys.
    norms: Option<[RmsNorm; 2]>,
    /// Latent projections have them themselves.
    positions: Option<Positions>,
    out: Linear,
    config: AttentionConfig,
}

impl SelfAttention {
    fn new(config: &ModelConfig, layer: usize, positions: Option<&Positions>, part: &Part) -> Result<Self> {
        let head_dim = config.head_dim;
        let widths =
            [config.num_heads, config.num_kv_heads, config.num_kv_heads].map(|heads| heads * head_dim);
        let (projections, out) = Projections::new(config, widths, positions, part)?;
        let norm = |name: &str| rms_norm(head_dim, config.norm_eps, part.pp(name).of_heads());
        let norms = if config.qk_norm { Some([norm("q_norm")?, norm("k_norm")?]) } else { None };
        let window = config.windows.get(layer).copied().flatten();
        let mask = window.map_or(AttentionMask::Causal, AttentionMask::SlidingWindow);
        let heads = part.share("num_attention_heads", config.num_heads)?;
        let num_kv_heads = Some(part.share("num_key_value_heads", config.num_kv_heads)?);
        let dropout = Dropout::by_row(config.dropout.attention, &part.whole().prefix())?;
        let dropout = Some(dropout.after(part.layers().rank() * heads));
        let scale = config.latent.as_ref().map(|latent| latent.scale);
        let positions = positions.filter(|_| config.latent.is_none()).cloned();
        let config = AttentionConfig { num_kv_heads, scale, dropout, ..AttentionConfig::new(heads, mask) };
        Ok(Self { projections, norms, positions, out, config })
    }

    fn forward(&self, x: &Tensor, cache: Option<&mut KvCache>) -> Result<Tensor> {
        let offset = cache.as_ref().map_or(0, |cache| cache.len());
        let [mut q, mut k, v] = match &self.projections {
            Projections::Apart([q, k, v]) => [q.forward(x)?, k.forward(x)?, v.forward(x)?],
            Projections::Together(all) => {
                let all = all.forward(x)?;
                let width = all.dim(2)? / 3;
                let part = |place: usize| columns(&all, place * width..(place + 1) * width);
                [part(0)?, part(1)?, part(2)?]
            }
            Projections::Latent(all) => all.forward(x, offset)?,
        };
        if let Some([of_q, of_k]) = &self.norms {
            (q, k) = (of_q.forward_heads(&q)?, of_k.forward_heads(&k)?);
        }
        if let Some(positions) = &self.positions {
            (q, k) = (positions.apply(&q, offset)?, positions.apply(&k, offset)?);
        }
        let mixed = match (cache, RowContext::current().divided) {
            (None, _) => attention(&q, &k, &v, &self.config)?,
            (Some(cache), None) => {
                let [k, v] = cache.append(&k, &v)?;
                attention(&q, &k, &v, &self.config)?
            }
            (Some(cache), Some(rows)) => {
                cache.append(&rows.whole_of(&k)?, &rows.whole_of(&v)?)?;
                attention(&q, &k, &v, &self.config)?
            }
        };
        match &self.projections {
            Projections::Latent(all) => self.out.forward(&all.without_zeros(&mixed)?),
            _ => self.out.forward(&mixed),
        }
    }
}

/// The feed-forward layer of a block: dense, or with experts.
enum BlockFeedForward {
    Dense(FeedForward),
    Sparse(Box<SparseFeedForward>),
}

impl BlockFeedForward {
    fn new(config: &ModelConfig, layer: usize, part: &Part) -> Result<Self> {
        let is_sparse = |experts: &&ExpertsConfig| experts.layers.get(layer) == Some(&true);
        match config.experts.as_ref().filter(is_sparse) {
            Some(experts) => {
                let part = part.pp(names::of_experts(config.family).block);
                Ok(Self::Sparse(Box::new(SparseFeedForward::new(config, experts, &part)?)))
            }
            None => Ok(Self::Dense(FeedForward::new(config, config.intermediate_size, &part.pp("mlp"))?)),
        }
    }
}

impl Module for BlockFeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(layer) => layer.forward(x),
            Self::Sparse(experts) => experts.forward(x),
        }
    }
}

/// Dropout between divided layers, on activations of shape `(batch, length, hidden)`.
pub(crate) struct ResidualDropout {
    dropout: Dropout,
    layers: Arc<dyn Layers>,
}

impl ResidualDropout {
    pub(crate) fn new(p: f64, name: &str, part: &Part) -> Result<Self> {
        let dropout = Dropout::by_row(p, &part.pp(name).whole().prefix())?;
        Ok(Self { dropout, layers: part.layers().clone() })
    }
}

impl Module for ResidualDropout {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.dropout.p() == 0.0 {
            return Ok(x.clone());
        }
        self.dropout.clone().after(self.layers.positions_before(x.dim(1)?)).forward_t(x, true)
    }
}

/// Transformer block.
pub(crate) struct Block {
    before_attention: Norm,
    attention: SelfAttention,
    before_feed_forward: Norm,
    feed_forward: BlockFeedForward,
    /// Dropout of the attention output and of the feed-forward output.
    dropped: [ResidualDropout; 2],
}

impl Block {
    pub(crate) fn new(
        config: &ModelConfig,
        layer: usize,
        positions: Option<&Positions>,
        part: &Part,
    ) -> Result<Self> {
        let [norm1, attention, norm2] = match config.family {
            Family::Gpt2 => ["ln_1", "attn", "ln_2"],
            _ => ["input_layernorm", "self_attn", "post_attention_layernorm"],
        };
        Ok(Self {
            before_attention: Norm::new(config, &part.pp(norm1))?,
            attention: SelfAttention::new(config, layer, positions, &part.pp(attention))?,
            before_feed_forward: Norm::new(config, &part.pp(norm2))?,
            feed_forward: BlockFeedForward::new(config, layer, part)?,
            dropped: [
                ResidualDropout::new(config.dropout.residual, "after_attention", part)?,
                ResidualDropout::new(config.dropout.residual, "after_feed_forward", part)?,
            ],
        })
    }

    /// Runs the block. With a cache, the tokens follow those in the cache and are added to it.
    pub(crate) fn forward_with(&self, x: &Tensor, cache: Option<&mut KvCache>) -> Result<Tensor> {
        let [after_attention, after_feed_forward] = &self.dropped;
        let mixed = self.attention.forward(&self.before_attention.forward(x)?, cache)?;
        let x = add(x, &after_attention.forward(&mixed)?)?;
        let fed = self.feed_forward.forward(&self.before_feed_forward.forward(&x)?)?;
        add(&x, &after_feed_forward.forward(&fed)?)
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, None)
    }
}

/// Returns the rotary table that the blocks share; `None` for a model without rotary embedding.
pub(crate) fn rotary_positions(config: &ModelConfig) -> Option<Positions> {
    config.rotary.as_ref().map(Positions::new)
}
