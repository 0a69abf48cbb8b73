//! The Transformer of the DDP and pipeline tutorials.

mod block;
pub mod module_tree;
pub mod options;
mod positions;
pub mod rows;
mod tokens;

use candle_core::{Module, Result, Tensor};
use candle_nn::{ModuleT, VarBuilder};
use ops::{AttentionMask, Linear, linear};
use sampler::SharedGenerator;

pub use block::{LAYER_NORM_EPS, TransformerBlock};
pub use positions::PositionalEncoding;
pub use tokens::TokenEmbedding;

/// The sizes of a [`Transformer`].
#[derive(Debug, Clone, PartialEq)]
pub struct TransformerConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Features of a token; even, and a multiple of the number of heads. Default 512.
    pub d_model: usize,
    /// Attention heads. Default 8.
    pub num_heads: usize,
    /// Width of the feed-forward layers. Default 2048.
    pub d_ff: usize,
    /// Blocks. Default 6.
    pub num_layers: usize,
    /// Longest row of tokens. Default 5000.
    pub max_len: usize,
    /// Probability with which dropout zeroes a number. Default 0.1.
    pub dropout: f64,
    /// Tokens that a token attends to. Default: all.
    pub mask: AttentionMask,
}

impl Default for TransformerConfig {
    fn default() -> Self {
        Self {
            vocab_size: 0,
            d_model: 512,
            num_heads: 8,
            d_ff: 2048,
            num_layers: 6,
            max_len: 5000,
            dropout: 0.1,
            mask: AttentionMask::Full,
        }
    }
}

/// Embedding, sinusoidal positions, blocks of attention and feed-forward, and a linear layer to logits.
///
/// Its variables have PyTorch's names and are created in PyTorch's order. `pos_encoding.pe` is a buffer, not a
/// parameter: pass the last part of its name to `ddp::DdpConfig::buffers`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{ModuleT, VarBuilder, VarMap};
/// use bin::documents::shared::transformer::{Transformer, TransformerConfig};
/// use sampler::{Generator, SharedGenerator};
///
/// let config = TransformerConfig { vocab_size: 100, d_model: 12, num_heads: 4, max_len: 10, ..Default::default() };
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let model = Transformer::new(builder, &config, &SharedGenerator::from(Generator::new(1)))?;
/// let tokens = Tensor::zeros((2, 9), DType::U32, &Device::Cpu)?;
/// assert_eq!(model.forward_t(&tokens, true)?.dims(), [2, 9, 100]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Transformer {
    embedding: TokenEmbedding,
    pos_encoding: PositionalEncoding,
    layers: Vec<TransformerBlock>,
    out_linear: Linear,
}

impl Transformer {
    /// Creates the model. Its dropout draws from `random`.
    ///
    /// # Errors
    /// Those of the builder, and incompatible sizes.
    pub fn new(
        builder: VarBuilder<'_>,
        config: &TransformerConfig,
        random: &SharedGenerator,
    ) -> Result<Self> {
        let &TransformerConfig { vocab_size, d_model, num_layers, max_len, .. } = config;
        let embedding = TokenEmbedding::new(vocab_size, d_model, builder.pp("embedding"))?;
        let pos_encoding = PositionalEncoding::new(max_len, d_model, builder.pp("pos_encoding"))?;
        let blocks = builder.pp("layers");
        let layers = (0..num_layers)
            .map(|layer| TransformerBlock::new(blocks.pp(layer), config, random))
            .collect::<Result<_>>()?;
        let out_linear = linear(d_model, vocab_size, builder.pp("out_linear"))?;
        Ok(Self { embedding, pos_encoding, layers, out_linear })
    }
}

impl ModuleT for Transformer {
    /// # Shapes
    /// Tokens (batch, length) to logits (batch, length, vocab_size).
    fn forward_t(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.pos_encoding.forward(&self.embedding.forward(tokens)?)?;
        let x = self.layers.iter().try_fold(x, |x, layer| layer.forward_t(&x, train))?;
        self.out_linear.forward(&x)
    }
}
