//! Attention whose heads are divided over the ranks.

use candle_core::Tensor;
use training::{AttentionConfig, AttentionMask, attention, columns};

use crate::{ColumnConfig, ColumnParallelLinear, Error, Result, RowConfig, RowParallelLinear, ShardBuilder};

/// Self-attention of several heads, of which each rank has some. Queries, keys and values come from one product.
///
/// Its weights are `qkv.weight` (3 d_model, d_model), the rows of queries above those of keys above those of values as in PyTorch's
/// `nn.MultiheadAttention`, and `out.weight` (d_model, d_model), each with a bias.
///
/// # Shapes
/// (batch, length, d_model) to the same; with sequence parallelism each rank has its part of the sequence.
///
/// # Cost
/// One all-reduce forward, one backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM" (2019), section 3.
#[derive(Debug, Clone)]
pub struct ParallelSelfAttention {
    qkv: ColumnParallelLinear,
    out: RowParallelLinear,
    own_heads: usize,
    visible: AttentionMask,
}

impl ParallelSelfAttention {
    /// `num_heads` heads over `d_model` features.
    ///
    /// # Errors
    /// Heads that the ranks do not divide, or that do not divide the features; those of the builder.
    pub fn new(
        d_model: usize,
        num_heads: usize,
        visible: AttentionMask,
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
            visible,
        })
    }

    /// Computes it.
    ///
    /// # Errors
    /// An input of another width; those of communication.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(x)?;
        let width = qkv.dim(2)? / 3;
        let part = |place: usize| columns(&qkv, place * width..(place + 1) * width);
        let config = AttentionConfig::new(self.own_heads, self.visible);
        let mixed = attention(&part(0)?, &part(1)?, &part(2)?, &config)?;
        self.out.forward(&mixed)
    }
}
