//! A table of vectors that is divided by its rows.

use candle_core::Tensor;
use candle_nn::Init;

use crate::averaging::Weight;
use crate::division::Division;
use crate::{Context, Result, ShardBuilder, op};

/// `nn.Embedding` of which each rank has the vectors of some tokens. Where the ranks do not divide the vocabulary, the first
/// ones have one token more: there is no padding in weights, gradients, files or checkpoints.
///
/// # Shapes
/// Tokens (batch, length), whole numbers and the same on every rank, to (batch, length, features), with sequence parallelism
/// (batch, length / ranks, features).
///
/// # Cost
/// Forward an all-reduce of the output, backward no communication. With sequence parallelism a reduce-scatter forward and an
/// all-gather backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3.
#[derive(Debug, Clone)]
pub struct VocabParallelEmbedding {
    weight: Weight,
    vocab_size: usize,
    context: Context,
}

impl VocabParallelEmbedding {
    /// A table of the builder's `weight` (vocab_size, features).
    ///
    /// # Errors
    /// Fewer tokens than ranks; those of the builder.
    pub fn new(vocab_size: usize, features: usize, builder: &ShardBuilder) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let weight = builder.weight((vocab_size, features), "weight", init, Division::VOCABULARY)?;
        Ok(Self { weight, vocab_size, context: builder.context().clone() })
    }

    /// The vectors of tokens.
    ///
    /// # Errors
    /// A token that the vocabulary has not; those of communication.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        op::embedding(tokens, (&self.weight, self.vocab_size), &self.context)
    }
}
