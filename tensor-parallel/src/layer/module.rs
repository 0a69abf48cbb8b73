//! Implementations of candle's `Module` and `ModuleT` for the layers.

use candle_core::{Module, Result, Tensor};
use candle_nn::ModuleT;

use crate::{
    ColumnParallelLinear, ParallelMlp, ParallelSelfAttention, ParallelTransformerLayer, RowParallelLinear,
    VocabParallelEmbedding,
};

macro_rules! modules {
    ($($layer:ty),*) => {
        $(impl Module for $layer {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                // The inherent method of the same name.
                Ok(<$layer>::forward(self, x)?)
            }
        })*
    };
}

modules!(ColumnParallelLinear, RowParallelLinear, ParallelMlp, ParallelSelfAttention, VocabParallelEmbedding);

impl ModuleT for ParallelTransformerLayer {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        Ok(ParallelTransformerLayer::forward_t(self, x, train)?)
    }
}
