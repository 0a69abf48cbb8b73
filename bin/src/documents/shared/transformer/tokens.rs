//! Token embedding.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// `nn.Embedding(tokens, features)`: one row of the variable `weight` for each token.
#[derive(Debug)]
pub struct TokenEmbedding {
    weight: Tensor,
}

impl TokenEmbedding {
    /// Creates the table, standard normal as PyTorch's.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(tokens: usize, features: usize, builder: VarBuilder<'_>) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        Ok(Self { weight: builder.get_with_hints((tokens, features), "weight", init)? })
    }
}

impl Module for TokenEmbedding {
    /// # Shapes
    /// (batch, length) to (batch, length, features).
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        ops::embedding(&self.weight, tokens)
    }
}
