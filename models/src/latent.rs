//! Queries, keys and values of latent attention.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use ops::tape::{explicit_op1, explicit_op2};
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
        let turned = columns(&queries, plain_dim..plain_dim + rotary_dim)?.flatten_from(2)?;
        let turned = by_head(&self.positions.apply(&turned, offset)?)?;
        let common = self.positions.apply(&common, offset)?.unsqueeze(2)?;
        let queries = head_parts(&queries, 0..plain_dim, Some(&turned), self.width())?;
        let values = head_parts(&keys, plain_dim..plain_dim + value_dim, None, self.width())?;
        let keys = head_parts(&keys, 0..plain_dim, Some(&common), self.width())?;
        Ok([queries.flatten_from(2)?, keys.flatten_from(2)?, values.flatten_from(2)?])
    }

    /// Leaves out the zeros at the end of the heads of attention's result.
    pub(crate) fn without_zeros(&self, mixed: &Tensor) -> Result<Tensor> {
        let (batch, len, _) = mixed.dims3()?;
        if self.width() == self.latent.value_dim {
            return Ok(mixed.clone());
        }
        let heads = mixed.reshape((batch, len, self.heads, ()))?;
        columns(&heads, 0..self.latent.value_dim)?.flatten_from(2)
    }

    fn width(&self) -> usize {
        (self.latent.plain_dim + self.latent.rotary_dim).max(self.latent.value_dim)
    }
}

/// Joins some columns of `x` with `end`, and zeros up to `width`: one operation that `ops::tape::backward` knows.
///
/// # Shapes
/// `(batch, length, heads, ..)` and `(batch, length, heads or 1, ..)` to `(batch, length, heads, width)`.
fn head_parts(x: &Tensor, part: Range<usize>, end: Option<&Tensor>, width: usize) -> Result<Tensor> {
    let (batch, len, heads, size) = x.dims4()?;
    let of_end = end.map_or(Ok(0), |end| end.dim(3))?;
    let mut all = vec![x.detach().narrow(3, part.start, part.len())?];
    if let Some(end) = end {
        all.push(end.detach().broadcast_as((batch, len, heads, of_end))?);
    }
    let zeros = width - part.len() - of_end;
    if zeros > 0 {
        all.push(Tensor::zeros((batch, len, heads, zeros), x.dtype(), x.device())?);
    }
    let joined = Tensor::cat(&all, 3)?;
    let own = part.len();
    let of_x = move |gradient: &Tensor| {
        gradient.narrow(3, 0, own)?.pad_with_zeros(3, part.start, size - part.end)?.contiguous()
    };
    let Some(end) = end else {
        return explicit_op1("head_parts", [x], joined, move |_, gradient| {
            Ok([Some(of_x(&gradient.detach())?)])
        });
    };
    explicit_op2("head_parts", [x, end], joined, move |[_, end], gradient| {
        let gradient = gradient.detach();
        let own = gradient.narrow(3, own, of_end)?;
        let of_end = if end.dim(2)? == heads { own.contiguous()? } else { own.sum_keepdim(2)? };
        Ok([Some(of_x(&gradient)?), Some(of_end)])
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    /// As candle's narrow, cat and padding, with an end of each head and with one of all, or none.
    #[test]
    fn parts_of_heads_are_candles() -> Result<()> {
        let random =
            |width, heads| Var::from_tensor(&Tensor::randn(0f64, 1., (2, 3, heads, width), &Device::Cpu)?);
        let x = random(7, 5)?;
        let factor = Tensor::randn(0f64, 1., (2, 3, 5, 9), &Device::Cpu)?;
        for end in [Some(random(4, 5)?), Some(random(4, 1)?), None] {
            let part = x.narrow(3, 1, 4)?;
            let joined = match &end {
                Some(end) => Tensor::cat(&[&part, &end.broadcast_as((2, 3, 5, 4))?], 3)?,
                None => part,
            };
            let candles = joined.pad_with_zeros(3, 0, 9 - joined.dim(3)?)?;
            let ours = head_parts(&x, 1..5, end.as_deref(), 9)?;
            assert_eq!((&ours - &candles)?.abs()?.sum_all()?.to_scalar::<f64>()?, 0.0);
            let loss = ops::tape::scalar_with_gradient(&ours, factor.clone())?;
            assert!(ops::tape::knows(&loss));
            let expected = (&candles * &factor)?.sum_all()?.backward()?;
            for grads in [ops::tape::backward(&loss)?, loss.backward()?] {
                for var in [Some(&x), end.as_ref()].into_iter().flatten() {
                    let [ours, candles] =
                        [&grads, &expected].map(|grads| grads.get(var).expect("a gradient"));
                    let gap = (ours - candles)?.abs()?.max_all()?.to_scalar::<f64>()?;
                    assert!(gap < 1e-12 && ours.dtype() == DType::F64, "{gap}");
                }
            }
        }
        Ok(())
    }
}
