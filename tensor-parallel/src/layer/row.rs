//! A linear layer that is divided by its inputs.

use candle_core::Tensor;
use candle_nn::Init;
use comm::autograd;

use crate::averaging::Weight;
use crate::{Context, Result, ShardBuilder, Split, op};

/// How a [`RowParallelLinear`] is made.
#[derive(Debug, Clone)]
pub struct RowConfig {
    /// Whether there is a bias. Default: true.
    pub bias: bool,
    /// Whether each rank is given its part of the inputs, as a [`ColumnParallelLinear`](crate::ColumnParallelLinear) leaves
    /// them, or all of them. Default: true.
    pub input_is_divided: bool,
}

impl Default for RowConfig {
    fn default() -> Self {
        Self { bias: true, input_is_divided: true }
    }
}

/// `x w' + b` of which each rank has some of the inputs: its columns of `w`. The bias, which every rank has whole, is added once,
/// to the sum.
///
/// # Shapes
/// Input (.., inputs / ranks), or all inputs where they are still to be divided; output (.., outputs), the same on every rank,
/// or with sequence parallelism (.., length / ranks, outputs).
///
/// # Cost
/// Forward an all-reduce of the output, backward no communication. With sequence parallelism a reduce-scatter forward and an
/// all-gather backward: as many bytes.
///
/// # Source
/// As [`ColumnParallelLinear`](crate::ColumnParallelLinear).
#[derive(Debug, Clone)]
pub struct RowParallelLinear {
    weight: Weight,
    bias: Option<Tensor>,
    input_is_divided: bool,
    context: Context,
}

impl RowParallelLinear {
    /// A layer of the builder's `weight` (outputs, inputs) and `bias` (outputs).
    ///
    /// # Errors
    /// Inputs that the ranks do not divide; those of the builder.
    pub fn new(inputs: usize, outputs: usize, config: &RowConfig, builder: &ShardBuilder) -> Result<Self> {
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        let weight = builder.weight((outputs, inputs), "weight", init, Split::Columns)?;
        let bound = 1.0 / (inputs as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let bias = if config.bias { Some(builder.get_between(outputs, "bias", init)?) } else { None };
        let (input_is_divided, context) = (config.input_is_divided, builder.context().clone());
        Ok(Self { weight, bias, input_is_divided, context })
    }

    /// Computes the outputs.
    ///
    /// # Errors
    /// An input of another width; those of communication.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let own = match self.input_is_divided {
            true => x.clone(),
            false => autograd::split_to_group(x, x.rank().saturating_sub(1), self.context.comm())?,
        };
        op::row(&own, &self.weight, self.bias.as_ref(), &self.context)
    }
}
