//! A table of vectors that is divided by its rows.

use candle_core::Tensor;
use candle_nn::Init;

use crate::averaging::Weight;
use crate::{Context, Result, ShardBuilder, Split, op};

/// `nn.Embedding` of which each rank has the vectors of some tokens.
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
    context: Context,
}

impl VocabParallelEmbedding {
    /// A table of the builder's `weight` (vocab_size, features).
    ///
    /// # Errors
    /// A vocabulary that the ranks do not divide; those of the builder.
    pub fn new(vocab_size: usize, features: usize, builder: &ShardBuilder) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let weight = builder.weight((vocab_size, features), "weight", init, Split::ROWS)?;
        Ok(Self { weight, context: builder.context().clone() })
    }

    /// The vectors of tokens.
    ///
    /// # Errors
    /// A token that the vocabulary has not; those of communication.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        op::embedding(tokens, &self.weight, &self.context)
    }
}
