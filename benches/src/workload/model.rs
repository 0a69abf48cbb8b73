//! Model sizes, token batches and loss of the workloads.

use bin::documents::shared::transformer::TransformerConfig;
use candle_core::{Device, Result, Tensor};
use ops::AttentionMask;
use sampler::{Generator, SharedGenerator};
use serde::{Deserialize, Serialize};

/// Seed of all random numbers.
const SEED: u64 = 42;

/// The sizes of a Transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Features of a token.
    pub d_model: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Width of the feed-forward layers.
    pub d_ff: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Tokens in a row.
    pub length: usize,
}

impl Sizes {
    /// A step takes a few milliseconds.
    pub const SMALL: Self =
        Self { vocab_size: 256, d_model: 64, num_heads: 4, d_ff: 256, num_layers: 4, length: 32 };
    /// Matrix products take nearly all of a step.
    pub const LARGE: Self =
        Self { vocab_size: 1024, d_model: 384, num_heads: 8, d_ff: 1536, num_layers: 4, length: 128 };

    pub(super) fn transformer(&self) -> TransformerConfig {
        let &Self { vocab_size, d_model, num_heads, d_ff, num_layers, length } = self;
        let (max_len, dropout, mask) = (length, 0.0, AttentionMask::Causal);
        TransformerConfig { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, dropout, mask }
    }

    /// Returns rows of tokens and their targets, the same on every rank; each takes its [`share`].
    pub(super) fn batch(&self, rows: usize) -> Result<(Tensor, Tensor)> {
        let mut generator = Generator::new(SEED);
        let mut tokens = || -> Result<Tensor> {
            let drawn = (0..rows * self.length).map(|_| generator.next_u32() % self.vocab_size as u32);
            Tensor::from_vec(drawn.collect::<Vec<_>>(), (rows, self.length), &Device::Cpu)
        };
        Ok((tokens()?, tokens()?))
    }
}

/// Returns the generator that weights are drawn from.
pub(super) fn generator() -> SharedGenerator {
    Generator::new(SEED).into()
}

/// Returns the mean cross-entropy over tokens.
pub(super) fn loss(logits: &Tensor, next: &Tensor) -> Result<Tensor> {
    ops::cross_entropy(&logits.flatten(0, 1)?, &next.flatten_all()?, None)
}

/// Returns a rank's share of a batch.
pub(super) fn share(batch: &Tensor, rank: usize, ranks: usize) -> Result<Tensor> {
    let rows = batch.dim(0)? / ranks;
    batch.narrow(0, rank * rows, rows)?.contiguous()
}
