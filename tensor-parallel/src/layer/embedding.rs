//! Vocabulary-parallel embedding: divided by its rows.

use candle_core::Tensor;
use candle_nn::Init;

use crate::division::Division;
use crate::{Context, Result, ShardBuilder, op};

/// `nn.Embedding` where each rank has the vectors of some tokens. If the vocabulary is not divisible by the number of ranks,
/// the first ranks have one token more: there is no padding in weights, gradients, files or checkpoints.
///
/// # Shapes
/// Tokens (batch, length), integers and the same on every rank, to (batch, length, features); with sequence parallelism
/// (batch, length / ranks, features).
///
/// # Cost
/// An all-reduce of the output in forward, no communication in backward. With sequence parallelism a reduce-scatter in
/// forward and an all-gather in backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    weight: Tensor,
    vocab_size: usize,
    context: Context,
}

impl VocabParallelEmbedding {
    /// Builds an embedding with the builder's `weight` (vocab_size, features).
    ///
    /// # Errors
    /// Fewer tokens than ranks; errors of the builder.
    pub fn new(vocab_size: usize, features: usize, builder: &ShardBuilder) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let weight = builder.parameter((vocab_size, features), "weight", init, Division::VOCABULARY)?;
        Ok(Self { weight, vocab_size, context: builder.context().clone() })
    }

    /// Returns the vectors of tokens.
    ///
    /// # Errors
    /// A token outside the vocabulary; failures of communication.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        op::embedding(tokens, (&self.weight, self.vocab_size), &self.context)
    }
}
