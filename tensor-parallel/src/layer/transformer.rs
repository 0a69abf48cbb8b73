//! Pre-norm transformer layer.

use candle_core::{Module, Tensor};
use candle_nn::ModuleT;
use ops::tape::add;
use ops::{AttentionMask, Dropout, LayerNorm};

use crate::{Context, ParallelMlp, ParallelSelfAttention, Result, ShardBuilder};

use super::norm;

/// The sizes of a [`ParallelTransformerLayer`].
#[derive(Debug, Clone)]
pub struct TransformerLayerConfig {
    /// Features of a token.
    pub d_model: usize,
    /// Attention heads: a divisor of `d_model`, and divisible by the number of ranks.
    pub num_heads: usize,
    /// Width of the feed-forward layers.
    pub d_ff: usize,
    /// Attention mask.
    pub mask: AttentionMask,
    /// Dropout probability for the outputs of attention and feed-forward.
    pub dropout: f64,
}

/// `x + attention(norm1(x))`, then `x + feed_forward(norm2(x))`.
///
/// # Shapes
/// (batch, length, d_model) to the same; with sequence parallelism each rank has its part of the sequence.
///
/// # Cost
/// Two all-reduces in forward and two in backward; with sequence parallelism two reduce-scatters and two all-gathers in each,
/// which are as many bytes.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3; with sequence parallelism Korthikanti et al., "Reducing Activation
/// Recomputation in Large Transformer Models" (2022), section 4.2.
#[derive(Debug, Clone)]
pub struct ParallelTransformerLayer {
    norm1: LayerNorm,
    attention: ParallelSelfAttention,
    norm2: LayerNorm,
    feed_forward: ParallelMlp,
    dropout: Dropout,
}

impl ParallelTransformerLayer {
    /// Builds a layer with the parts `norm1`, `attention`, `norm2` and `feed_forward`.
    ///
    /// # Errors
    /// Incompatible sizes, or sizes that are not divisible by the number of ranks; errors of the builder.
    pub fn new(config: &TransformerLayerConfig, builder: &ShardBuilder) -> Result<Self> {
        let &TransformerLayerConfig { d_model, num_heads, d_ff, mask, dropout } = config;
        let attention = ParallelSelfAttention::new(d_model, num_heads, mask, &builder.pp("attention"))?;
        Ok(Self {
            norm1: norm(d_model, &builder.pp("norm1"))?,
            attention,
            norm2: norm(d_model, &builder.pp("norm2"))?,
            feed_forward: ParallelMlp::new(d_model, d_ff, &builder.pp("feed_forward"))?,
            dropout: dropout_between(dropout, builder.context())?,
        })
    }

    /// Computes the output; dropout is applied only if `train`.
    ///
    /// # Errors
    /// An input of the wrong width; failures of communication.
    pub fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mixed = self.attention.forward(&self.norm1.forward(x)?)?;
        let x = add(x, &self.dropout.forward_t(&mixed, train)?)?;
        let fed = self.feed_forward.forward(&self.norm2.forward(&x)?)?;
        Ok(add(&x, &self.dropout.forward_t(&fed, train)?)?)
    }
}

/// Builds dropout for activations between the divided layers: the same on every rank, unless each rank has its part of the
/// sequence.
pub(crate) fn dropout_between(p: f64, context: &Context) -> Result<Dropout> {
    let random = context.random();
    let stream = if context.sequence_parallel() { random.own() } else { random.equal() };
    Ok(Dropout::new(p, stream.clone()).map_err(candle_core::Error::from)?)
}
