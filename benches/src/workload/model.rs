//! The model's sizes, and the tokens that it is shown.

use bin::models::transformer::TransformerConfig;
use candle_core::{Device, Result, Tensor};
use sampler::{Generator, SharedGenerator};
use serde::{Deserialize, Serialize};
use training::AttentionMask;

/// Where all random numbers come from.
const SEED: u64 = 42;

/// The sizes of a Transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Numbers that a token becomes.
    pub d_model: usize,
    /// Heads of attention.
    pub num_heads: usize,
    /// Width of the feed-forward layers.
    pub d_ff: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Tokens in a row.
    pub length: usize,
}

impl Sizes {
    /// A step of a few milliseconds.
    pub const SMALL: Self =
        Self { vocab_size: 256, d_model: 64, num_heads: 4, d_ff: 256, num_layers: 4, length: 32 };
    /// A step of which nearly all is matrix products.
    pub const LARGE: Self =
        Self { vocab_size: 1024, d_model: 384, num_heads: 8, d_ff: 1536, num_layers: 4, length: 128 };

    pub(super) fn transformer(&self) -> TransformerConfig {
        let &Self { vocab_size, d_model, num_heads, d_ff, num_layers, length } = self;
        let (max_len, dropout, visible) = (length, 0.0, AttentionMask::Causal);
        TransformerConfig { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, dropout, visible }
    }

    /// Rows of tokens, and the tokens to be predicted: the same on every rank, of which each takes its part.
    pub(super) fn batch(&self, rows: usize) -> Result<(Tensor, Tensor)> {
        let mut generator = Generator::new(SEED);
        let mut tokens = || -> Result<Tensor> {
            let drawn = (0..rows * self.length).map(|_| generator.next_u32() % self.vocab_size as u32);
            Tensor::from_vec(drawn.collect::<Vec<_>>(), (rows, self.length), &Device::Cpu)
        };
        Ok((tokens()?, tokens()?))
    }
}

/// What the weights are drawn from.
pub(super) fn generator() -> SharedGenerator {
    Generator::new(SEED).into()
}

/// The mean cross-entropy of each token's logits.
pub(super) fn loss(logits: &Tensor, next: &Tensor) -> Result<Tensor> {
    training::cross_entropy(&logits.flatten(0, 1)?, &next.flatten_all()?, None)
}

/// A rank's part of a batch.
pub(super) fn share(batch: &Tensor, rank: usize, ranks: usize) -> Result<Tensor> {
    let rows = batch.dim(0)? / ranks;
    batch.narrow(0, rank * rows, rows)?.contiguous()
}
