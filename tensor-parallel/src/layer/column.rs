//! Column-parallel linear layer: divided by its outputs.

use candle_core::Tensor;
use candle_nn::Init;

use crate::division::Division;
use crate::{Context, Result, ShardBuilder, Split, op};

/// Configuration of a [`ColumnParallelLinear`].
#[derive(Debug, Clone)]
pub struct ColumnConfig {
    /// Whether there is a bias. Default: true.
    pub bias: bool,
    /// Whether outputs are gathered, so that every rank gets all of them. Not needed before a
    /// [`RowParallelLinear`](crate::RowParallelLinear), whose input is divided. Default: false.
    pub gather_output: bool,
    /// Number of equally sized layers fused into one, each of which is divided over the ranks: 3 for queries, keys and
    /// values. Default: 1.
    pub groups: usize,
    /// Whether the outputs of a single group need not be divisible by the number of ranks: the first ranks then have one more
    /// than the others. For a language model's head, as in [`VocabParallelEmbedding`](crate::VocabParallelEmbedding).
    /// Default: false.
    pub uneven: bool,
}

impl Default for ColumnConfig {
    fn default() -> Self {
        Self { bias: true, gather_output: false, groups: 1, uneven: false }
    }
}

/// `x w' + b` where each rank computes some of the outputs: it has their rows of `w` and their part of `b`.
///
/// # Shapes
/// Input (.., inputs), the same on every rank; with sequence parallelism (.., length / ranks, inputs). Output (.., outputs /
/// ranks), or all outputs if they are gathered, one group after the other.
///
/// # Cost
/// No communication in forward; in backward an all-reduce of the input's gradient, overlapped with the computation of the
/// weight's gradient. With sequence parallelism an all-gather in forward, and in backward a reduce-scatter instead of the
/// all-reduce: as many bytes. If outputs are gathered, another all-gather in forward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
/// Models" (2022), section 4.2.
#[derive(Debug, Clone)]
pub struct ColumnParallelLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    gather_output: bool,
    groups: usize,
    outputs: usize,
    context: Context,
}

impl ColumnParallelLinear {
    /// Builds a layer with the builder's `weight` (outputs, inputs) and `bias` (outputs).
    ///
    /// # Errors
    /// Outputs that are not divisible by the number of ranks; errors of the builder.
    pub fn new(inputs: usize, outputs: usize, config: &ColumnConfig, builder: &ShardBuilder) -> Result<Self> {
        let split = Split::Rows { groups: config.groups };
        let split = Division { uneven: config.uneven, ..split.into() };
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        let weight = builder.parameter((outputs, inputs), "weight", init, split)?;
        let bound = 1.0 / (inputs as f64).sqrt();
        let init = Init::Uniform { lo: -bound, up: bound };
        let bias = if config.bias { Some(builder.parameter(outputs, "bias", init, split)?) } else { None };
        let (gather_output, groups, context) =
            (config.gather_output, config.groups.max(1), builder.context().clone());
        Ok(Self { weight, bias, gather_output, groups, outputs, context })
    }

    /// Computes this rank's outputs, or all of them if they are gathered.
    ///
    /// # Errors
    /// An input of the wrong width; failures of communication.
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
        // The gathered outputs are ordered by rank, then group; they are reordered by group, then rank.
        let whole = y.dims().to_vec();
        let mut parts = whole[..dim].to_vec();
        parts.extend([ranks, groups, whole[dim] / (ranks * groups)]);
        Ok(y.reshape(parts)?.transpose(dim, dim + 1)?.reshape(whole)?)
    }
}
