//! Row-parallel linear layer: divided by its inputs.

use candle_core::Tensor;
use candle_nn::Init;
use comm::autograd;

use crate::{Context, Result, ShardBuilder, Split, op};

/// Configuration of a [`RowParallelLinear`].
#[derive(Debug, Clone)]
pub struct RowConfig {
    /// Whether there is a bias. Default: true.
    pub bias: bool,
    /// Whether each rank's input is its part of the inputs, as a [`ColumnParallelLinear`](crate::ColumnParallelLinear)
    /// returns them, or all of them. Default: true.
    pub input_is_divided: bool,
}

impl Default for RowConfig {
    fn default() -> Self {
        Self { bias: true, input_is_divided: true }
    }
}

/// `x w' + b` where each rank has some of the inputs, and their columns of `w`. The bias, which every rank holds whole, is
/// added once, to the sum.
///
/// # Shapes
/// Input (.., inputs / ranks), or all inputs if they are not divided yet; output (.., outputs), the same on every rank, or
/// with sequence parallelism (.., length / ranks, outputs).
///
/// # Cost
/// An all-reduce of the output in forward, no communication in backward. With sequence parallelism a reduce-scatter in
/// forward and an all-gather in backward: as many bytes.
///
/// # Source
/// As [`ColumnParallelLinear`](crate::ColumnParallelLinear).
#[derive(Debug, Clone)]
pub struct RowParallelLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    input_is_divided: bool,
    context: Context,
}

impl RowParallelLinear {
    /// Builds a layer with the builder's `weight` (outputs, inputs) and `bias` (outputs).
    ///
    /// # Errors
    /// Inputs that are not divisible by the number of ranks; errors of the builder.
    pub fn new(inputs: usize, outputs: usize, config: &RowConfig, builder: &ShardBuilder) -> Result<Self> {
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        let weight = builder.parameter((outputs, inputs), "weight", init, Split::Columns)?;
        let bound = 1.0 / (inputs as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let bias = if config.bias { Some(builder.get_between(outputs, "bias", init)?) } else { None };
        let (input_is_divided, context) = (config.input_is_divided, builder.context().clone());
        Ok(Self { weight, bias, input_is_divided, context })
    }

    /// Computes the outputs.
    ///
    /// # Errors
    /// An input of the wrong width; failures of communication.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let own = match self.input_is_divided {
            true => x.clone(),
            false => autograd::split_to_group(x, x.rank().saturating_sub(1), self.context.comm())?,
        };
        op::row(&own, &self.weight, self.bias.as_ref(), &self.context)
    }
}
