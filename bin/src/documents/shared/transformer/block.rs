//! One block: attention, then feed-forward, each with dropout, a residual and a norm after it.

use candle_core::{Module, Result, Tensor};
use candle_nn::{ModuleT, VarBuilder};
use ops::tape::add;
use ops::{AttentionConfig, AttentionMask, Dropout, LayerNorm, Linear, attention, layer_norm, linear, relu};
use sampler::SharedGenerator;

use super::TransformerConfig;

/// PyTorch's default epsilon of LayerNorm.
pub const LAYER_NORM_EPS: f64 = 1e-5;

/// A block of a [`Transformer`](super::Transformer).
#[derive(Debug)]
pub struct TransformerBlock {
    attention: SelfAttention,
    norm1: LayerNorm,
    ffn: FeedForward,
    norm2: LayerNorm,
    dropout: Dropout,
}

impl TransformerBlock {
    /// Creates the block. Its dropout draws from `random`.
    ///
    /// # Errors
    /// Those of the builder, and incompatible sizes.
    pub fn new(
        builder: VarBuilder<'_>,
        config: &TransformerConfig,
        random: &SharedGenerator,
    ) -> Result<Self> {
        let d_model = config.d_model;
        Ok(Self {
            attention: SelfAttention::new(builder.pp("attention"), config)?,
            norm1: layer_norm(d_model, LAYER_NORM_EPS, builder.pp("norm1"))?,
            ffn: FeedForward::new(builder.pp("ffn"), d_model, config.d_ff)?,
            norm2: layer_norm(d_model, LAYER_NORM_EPS, builder.pp("norm2"))?,
            dropout: Dropout::new(config.dropout, random.clone())?,
        })
    }
}

impl ModuleT for TransformerBlock {
    /// # Shapes
    /// (batch, length, d_model) to the same.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mixed = self.dropout.forward_t(&self.attention.forward(x)?, train)?;
        let x = self.norm1.forward(&add(x, &mixed)?)?;
        let fed = self.dropout.forward_t(&self.ffn.forward(&x)?, train)?;
        self.norm2.forward(&add(&x, &fed)?)
    }
}

#[derive(Debug)]
struct SelfAttention {
    q_linear: Linear,
    k_linear: Linear,
    v_linear: Linear,
    out_linear: Linear,
    num_heads: usize,
    mask: AttentionMask,
}

impl SelfAttention {
    fn new(builder: VarBuilder<'_>, config: &TransformerConfig) -> Result<Self> {
        let &TransformerConfig { d_model, num_heads, mask, .. } = config;
        let layer = |name: &str| linear(d_model, d_model, builder.pp(name));
        Ok(Self {
            q_linear: layer("q_linear")?,
            k_linear: layer("k_linear")?,
            v_linear: layer("v_linear")?,
            out_linear: layer("out_linear")?,
            num_heads,
            mask,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (q, k, v) = (self.q_linear.forward(x)?, self.k_linear.forward(x)?, self.v_linear.forward(x)?);
        let config = AttentionConfig::new(self.num_heads, self.mask);
        self.out_linear.forward(&attention(&q, &k, &v, &config)?)
    }
}

#[derive(Debug)]
struct FeedForward {
    fc1: Linear,
    fc2: Linear,
}

impl FeedForward {
    fn new(builder: VarBuilder<'_>, d_model: usize, d_ff: usize) -> Result<Self> {
        Ok(Self {
            fc1: linear(d_model, d_ff, builder.pp("fc1"))?,
            fc2: linear(d_ff, d_model, builder.pp("fc2"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&relu(&self.fc1.forward(x)?)?)
    }
}
