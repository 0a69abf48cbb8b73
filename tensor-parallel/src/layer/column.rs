//! A linear layer that is divided by its outputs.

use candle_core::Tensor;
use candle_nn::Init;

use crate::averaging::Weight;
use crate::division::Division;
use crate::{Context, Result, ShardBuilder, Split, op};

/// How a [`ColumnParallelLinear`] is made.
#[derive(Debug, Clone)]
pub struct ColumnConfig {
    /// Whether there is a bias. Default: true.
    pub bias: bool,
    /// Whether every rank gets the outputs of all. Not where a [`RowParallelLinear`](crate::RowParallelLinear) comes next, which
    /// takes them divided. Default: false.
    pub gather_output: bool,
    /// Layers of equal size in one, of each of which a rank has its part: 3 for queries, keys and values. Default: 1.
    pub groups: usize,
    /// Whether the ranks need not divide the outputs of one group: the first ranks then have one more than the others. For a language
    /// model's head, as in [`VocabParallelEmbedding`](crate::VocabParallelEmbedding). Default: false.
    pub uneven: bool,
}

impl Default for ColumnConfig {
    fn default() -> Self {
        Self { bias: true, gather_output: false, groups: 1, uneven: false }
    }
}

/// `x w' + b` of which each rank has some of the outputs: its rows of `w`, its part of `b`.
///
/// # Shapes
/// Input (.., inputs), the same on every rank; with sequence parallelism (.., length / ranks, inputs). Output (.., outputs /
/// ranks), or all outputs where they are gathered, one group after the other.
///
/// # Cost
/// Forward no communication, backward an all-reduce of the input's gradient, under way while the weight's is computed. With
/// sequence parallelism an all-gather forward, and a reduce-scatter in place of the all-reduce: as many bytes. Where outputs
/// are gathered, an all-gather forward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
/// Models" (2022), section 4.2.
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear {
    weight: Weight,
    bias: Option<Weight>,
    gather_output: bool,
    groups: usize,
    outputs: usize,
    context: Context,
}

impl ColumnParallelLinear {
    /// A layer of the builder's `weight` (outputs, inputs) and `bias` (outputs).
    ///
    /// # Errors
    /// Outputs that the ranks do not divide; those of the builder.
    pub fn new(inputs: usize, outputs: usize, config: &ColumnConfig, builder: &ShardBuilder) -> Result<Self> {
        let split = Split::Rows { groups: config.groups };
        let split = Division { uneven: config.uneven, ..split.into() };
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        let weight = builder.weight((outputs, inputs), "weight", init, split)?;
        let bound = 1.0 / (inputs as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let bias = if config.bias { Some(builder.weight(outputs, "bias", init, split)?) } else { None };
        let (gather_output, groups, context) =
            (config.gather_output, config.groups.max(1), builder.context().clone());
        Ok(Self { weight, bias, gather_output, groups, outputs, context })
    }

    /// Computes this rank's outputs.
    ///
    /// # Errors
    /// An input of another width; those of communication.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = op::column(x, &self.weight, self.bias.as_ref(), &self.context)?;
        if !self.gather_output {
            return Ok(y);
        }
        let dim = y.rank().saturating_sub(1);
        let y = self.context.gather_shares(&y, self.outputs)?;
        let (ranks, groups) = (self.context.ranks(), self.groups);
        if ranks == 1 || groups == 1 {
            return Ok(y);
        }
        // Each rank's part of every group comes together; a group's parts belong together.
        let whole = y.dims().to_vec();
        let mut parts = whole[..dim].to_vec();
        parts.extend([ranks, groups, whole[dim] / (ranks * groups)]);
        Ok(y.reshape(parts)?.transpose(dim, dim + 1)?.reshape(whole)?)
    }
}
