//! Queries, keys and values of latent attention.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use ops::{RmsNorm, columns, rms_norm};
use training::build::{Division, Layers, Linear, LinearConfig, Part};

use crate::rotary::Positions;
use crate::{LatentConfig, ModelConfig};

/// Epsilon of the norms of latent features, whatever that of other norms is.
const EPS: f64 = 1e-6;

/// Projections through a few features, of which the last divides heads over ranks.
#[derive(Debug)]
struct LowRank {
    down: Linear,
    norm: RmsNorm,
    up: Linear,
}

/// Projections to queries, keys and values of latent attention. Heads of queries and keys are as wide as those of values: the
/// narrower ones end with zeros, which change no score and no result.
pub(crate) struct LatentProjections {
    latent: LatentConfig,
    queries: Queries,
    /// Keys and values; the last outputs of the first layer are the part of the key that all heads have in common.
    keys: LowRank,
    positions: Positions,
    layers: Arc<dyn Layers>,
    /// This rank's heads.
    heads: usize,
}

#[derive(Debug)]
enum Queries {
    Direct(Linear),
    LowRank(LowRank),
}

impl LatentProjections {
    pub(crate) fn new(
        config: &ModelConfig,
        latent: &LatentConfig,
        positions: &Positions,
        part: &Part,
    ) -> Result<Self> {
        let (hidden, heads) = (config.hidden_size, config.num_heads);
        let of_heads = |name: &str, inputs, width| {
            part.pp(name).linear(&LinearConfig::new(inputs, heads * width, Division::Outputs))
        };
        let low_rank = |[down, norm, up]: [&str; 3], rank, more, width| {
            let config = LinearConfig::new(hidden, rank + more, Division::Whole).with_bias(config.qkv_bias);
            Ok::<_, candle_core::Error>(LowRank {
                down: part.pp(down).linear(&config)?,
                norm: rms_norm(rank, EPS, part.pp(norm).whole())?,
                up: of_heads(up, rank, width)?,
            })
        };
        let queries = match latent.query_rank {
            None => Queries::Direct(of_heads("q_proj", hidden, config.head_dim)?),
            Some(rank) => {
                let names = ["q_a_proj", "q_a_layernorm", "q_b_proj"];
                Queries::LowRank(low_rank(names, rank, 0, config.head_dim)?)
            }
        };
        let names = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"];
        let width = latent.plain_dim + latent.value_dim;
        Ok(Self {
            keys: low_rank(names, latent.key_rank, latent.rotary_dim, width)?,
            latent: latent.clone(),
            queries,
            positions: positions.clone(),
            layers: part.layers().clone(),
            heads: part.share("num_attention_heads", heads)?,
        })
    }

    /// Computes queries, keys and values of tokens that follow `offset` earlier ones, with their positions.
    ///
    /// # Shapes
    /// `(batch, length, hidden)` to `(batch, length, heads * width)`, width the larger one of heads of queries and of values.
    pub(crate) fn forward(&self, x: &Tensor, offset: usize) -> Result<[Tensor; 3]> {
        let LatentConfig { key_rank, plain_dim, rotary_dim, value_dim, .. } = self.latent;
        let queries = match &self.queries {
            Queries::Direct(layer) => layer.forward(x)?,
            Queries::LowRank(LowRank { down, norm, up }) => up.forward(&norm.forward(&down.forward(x)?)?)?,
        };
        let LowRank { down, norm, up } = &self.keys;
        let down = down.forward(x)?;
        let keys = up.forward(&norm.forward(&columns(&down, 0..key_rank)?)?)?;
        let common = self.layers.divide(&columns(&down, key_rank..key_rank + rotary_dim)?)?;

        let (batch, len, _) = queries.dims3()?;
        let by_head = |x: &Tensor| x.reshape((batch, len, self.heads, ()));
        let (queries, keys) = (by_head(&queries)?, by_head(&keys)?);
        let turned = queries.narrow(3, plain_dim, rotary_dim)?.contiguous()?;
        let turned = by_head(&self.positions.apply(&turned.flatten_from(2)?, offset)?)?;
        let queries = Tensor::cat(&[&queries.narrow(3, 0, plain_dim)?, &turned], 3)?;
        let common = self.positions.apply(&common, offset)?.unsqueeze(2)?;
        let common = common.broadcast_as((batch, len, self.heads, rotary_dim))?;
        let values = keys.narrow(3, plain_dim, value_dim)?;
        let keys = Tensor::cat(&[&keys.narrow(3, 0, plain_dim)?, &common], 3)?;
        let flat = |x: Tensor, width: usize| {
            x.pad_with_zeros(3, 0, self.width() - width)?.contiguous()?.flatten_from(2)
        };
        let width = plain_dim + rotary_dim;
        Ok([flat(queries, width)?, flat(keys, width)?, flat(values, value_dim)?])
    }

    /// Leaves out the zeros at the end of the heads of attention's result.
    pub(crate) fn without_zeros(&self, mixed: &Tensor) -> Result<Tensor> {
        let (batch, len, _) = mixed.dims3()?;
        if self.width() == self.latent.value_dim {
            return Ok(mixed.clone());
        }
        let heads = mixed.reshape((batch, len, self.heads, ()))?;
        heads.narrow(3, 0, self.latent.value_dim)?.contiguous()?.flatten_from(2)
    }

    fn width(&self) -> usize {
        (self.latent.plain_dim + self.latent.rotary_dim).max(self.latent.value_dim)
    }
}
