//! Multi-head self-attention with the heads divided over the ranks.

use candle_core::Tensor;
use ops::{AttentionConfig, AttentionMask, attention, columns};

use crate::{ColumnConfig, ColumnParallelLinear, Error, Result, RowConfig, RowParallelLinear, ShardBuilder};

/// Multi-head self-attention; each rank has some of the heads. Queries, keys and values are computed by one matrix product.
///
/// Its weights are `qkv.weight` (3 d_model, d_model), with the rows of queries, keys and values in this order as in PyTorch's
/// `nn.MultiheadAttention`, and `out.weight` (d_model, d_model), each with a bias.
///
/// # Shapes
/// (batch, length, d_model) to the same; with sequence parallelism each rank has its part of the sequence.
///
/// # Cost
/// One all-reduce in forward, one in backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3.
#[derive(Debug, Clone)]
pub struct ParallelSelfAttention {
    qkv: ColumnParallelLinear,
    out: RowParallelLinear,
    own_heads: usize,
    mask: AttentionMask,
}

impl ParallelSelfAttention {
    /// Builds attention of `num_heads` heads over `d_model` features.
    ///
    /// # Errors
    /// A number of heads that is not divisible by the number of ranks, or that does not divide `d_model`; errors of the
    /// builder.
    pub fn new(
        d_model: usize,
        num_heads: usize,
        mask: AttentionMask,
        builder: &ShardBuilder,
    ) -> Result<Self> {
        let ranks = builder.context().ranks();
        if num_heads == 0 || !num_heads.is_multiple_of(ranks) {
            let what = "the heads of attention".into();
            return Err(Error::Indivisible { what, size: num_heads, parts: ranks, ranks });
        }
        if !d_model.is_multiple_of(num_heads) {
            let help = format!("give a multiple of the {num_heads} heads");
            return Err(Error::invalid("d_model", d_model, help));
        }
        let config = ColumnConfig { groups: 3, ..ColumnConfig::default() };
        Ok(Self {
            qkv: ColumnParallelLinear::new(d_model, 3 * d_model, &config, &builder.pp("qkv"))?,
            out: RowParallelLinear::new(d_model, d_model, &RowConfig::default(), &builder.pp("out"))?,
            own_heads: num_heads / ranks,
            mask,
        })
    }

    /// Computes the attention output.
    ///
    /// # Errors
    /// An input of the wrong width; failures of communication.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(x)?;
        let width = qkv.dim(2)? / 3;
        let part = |place: usize| columns(&qkv, place * width..(place + 1) * width);
        let config = AttentionConfig::new(self.own_heads, self.mask);
        let mixed = attention(&part(0)?, &part(1)?, &part(2)?, &config)?;
        self.out.forward(&mixed)
    }
}
