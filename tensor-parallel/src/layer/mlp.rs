//! Feed-forward block: two linear layers with a GELU between them.

use candle_core::Tensor;
use ops::gelu;

use crate::{ColumnConfig, ColumnParallelLinear, Result, RowConfig, RowParallelLinear, ShardBuilder};

/// `fc2(gelu(fc1(x)))`, with the first layer divided by its outputs and the second by its inputs, so that no communication is
/// needed between them.
///
/// # Shapes
/// (.., features) to the same; with sequence parallelism each rank has its part of the sequence.
///
/// # Cost
/// One all-reduce in forward, one in backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3.
#[derive(Debug, Clone)]
pub struct ParallelMlp {
    fc1: ColumnParallelLinear,
    fc2: RowParallelLinear,
}

impl ParallelMlp {
    /// Builds a block from `features` to `hidden` and back; the layers are named `fc1` and `fc2`.
    ///
    /// # Errors
    /// A hidden size that is not divisible by the number of ranks; errors of the builder.
    pub fn new(features: usize, hidden: usize, builder: &ShardBuilder) -> Result<Self> {
        Ok(Self {
            fc1: ColumnParallelLinear::new(features, hidden, &ColumnConfig::default(), &builder.pp("fc1"))?,
            fc2: RowParallelLinear::new(hidden, features, &RowConfig::default(), &builder.pp("fc2"))?,
        })
    }

    /// Computes the output.
    ///
    /// # Errors
    /// An input of the wrong width; failures of communication.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&gelu(&self.fc1.forward(x)?)?)
    }
}
