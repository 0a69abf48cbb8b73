//! GPT-style language model of tensor-parallel layers.

use candle_core::{Module, Tensor};
use candle_nn::{Init, ModuleT};
use ops::{AttentionMask, Dropout, LayerNorm};

use crate::layer::dropout_between;
use crate::{
    ColumnConfig, ColumnParallelLinear, Context, Error, ParallelTransformerLayer, Result, ShardBuilder,
    TransformerLayerConfig, VocabParallelEmbedding, norm, vocab_parallel_cross_entropy,
};

/// The sizes of a [`LanguageModel`].
#[derive(Debug, Clone, PartialEq)]
pub struct LanguageModelConfig {
    /// Size of the vocabulary, which is divided over the ranks; if it is not divisible, the first ranks have one token more.
    /// Default 50,304.
    pub vocab_size: usize,
    /// Features of a token. Default 768.
    pub d_model: usize,
    /// Attention heads, divisible by the number of ranks. Default 12.
    pub num_heads: usize,
    /// Width of the feed-forward layers; 0: four times `d_model`. Default 0.
    pub d_ff: usize,
    /// Layers. Default 12.
    pub num_layers: usize,
    /// Maximum sequence length. Default 1024.
    pub max_len: usize,
    /// Dropout probability. Default 0.
    pub dropout: f64,
    /// Attention mask. Default: causal.
    pub mask: AttentionMask,
}

impl Default for LanguageModelConfig {
    fn default() -> Self {
        Self {
            vocab_size: 50_304,
            d_model: 768,
            num_heads: 12,
            d_ff: 0,
            num_layers: 12,
            max_len: 1024,
            dropout: 0.0,
            mask: AttentionMask::Causal,
        }
    }
}

impl LanguageModelConfig {
    /// Returns the width of the feed-forward layers, with 0 resolved.
    pub fn hidden(&self) -> usize {
        if self.d_ff == 0 { 4 * self.d_model } else { self.d_ff }
    }
}

/// Token and position embedding, transformer layers, a final norm, and a head that computes the logits; each rank computes
/// those of its part of the vocabulary.
///
/// Its parameters are `embedding.weight`, `position.weight`, `layers.0.norm1.weight` and so on, `norm.weight`, `norm.bias`
/// and `head.weight`, drawn in this order.
#[derive(Debug, Clone)]
pub struct LanguageModel {
    embedding: VocabParallelEmbedding,
    position: Tensor,
    dropout: Dropout,
    layers: Vec<ParallelTransformerLayer>,
    norm: LayerNorm,
    head: ColumnParallelLinear,
    vocab_size: usize,
    context: Context,
}

impl LanguageModel {
    /// Builds the model.
    ///
    /// # Errors
    /// Incompatible sizes, or sizes that are not divisible by the number of ranks; errors of the builder.
    pub fn new(builder: ShardBuilder, config: &LanguageModelConfig) -> Result<Self> {
        let &LanguageModelConfig { vocab_size, d_model, num_heads, max_len, dropout, mask, .. } = config;
        let layer = TransformerLayerConfig { d_model, num_heads, d_ff: config.hidden(), mask, dropout };
        let embedding = VocabParallelEmbedding::new(vocab_size, d_model, &builder.pp("embedding"))?;
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let position = builder.pp("position").get_between((max_len, d_model), "weight", init)?;
        let layers = (0..config.num_layers)
            .map(|place| ParallelTransformerLayer::new(&layer, &builder.pp("layers").pp(place)))
            .collect::<Result<_>>()?;
        let norm = norm(d_model, &builder.pp("norm"))?;
        let head = ColumnConfig { bias: false, uneven: true, ..ColumnConfig::default() };
        let head = ColumnParallelLinear::new(d_model, vocab_size, &head, &builder.pp("head"))?;
        let context = builder.context().clone();
        let dropout = dropout_between(dropout, &context)?;
        Ok(Self { embedding, position, dropout, layers, norm, head, vocab_size, context })
    }

    /// Returns this rank's part of the logits.
    ///
    /// # Shapes
    /// Tokens (batch, length) to (batch, length, this rank's part of vocab_size).
    ///
    /// # Errors
    /// A token outside the vocabulary; a sequence that is too long or, with sequence parallelism, not divisible by the number
    /// of ranks; failures of communication.
    pub fn forward_t(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let x = (self.embedding.forward(tokens)?.broadcast_add(&self.positions(tokens)?))?;
        let mut x = self.dropout.forward_t(&x, train)?;
        for layer in &self.layers {
            x = layer.forward_t(&x, train)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }

    /// Returns all logits, on every rank: for inference, not for training.
    ///
    /// # Shapes
    /// Tokens (batch, length) to (batch, length, vocab_size).
    ///
    /// # Errors
    /// As [`forward_t`](Self::forward_t).
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        self.context.gather_shares(&self.forward_t(tokens, false)?, self.vocab_size)
    }

    /// Returns the mean cross-entropy of predicting the tokens in `next`, with dropout active.
    ///
    /// # Shapes
    /// Both (batch, length).
    ///
    /// # Errors
    /// As [`forward_t`](Self::forward_t).
    pub fn loss(&self, tokens: &Tensor, next: &Tensor) -> Result<Tensor> {
        vocab_parallel_cross_entropy(&self.forward_t(tokens, true)?, next, &self.context)
    }

    /// Returns the position embeddings of this rank's part of the sequence.
    fn positions(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, len) = tokens.dims2()?;
        let longest = self.position.dim(0)?;
        if len > longest {
            return Err(Error::invalid(
                "tokens",
                format!("rows of {len}"),
                format!("give at most {longest}"),
            ));
        }
        if !self.context.sequence_parallel() {
            return Ok(self.position.narrow(0, 0, len)?);
        }
        let own = len / self.context.ranks();
        self.context.check_sequence(&[len, 1])?;
        Ok(self.position.narrow(0, self.context.rank() * own, own)?)
    }
}
