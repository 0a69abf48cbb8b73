//! Attention on CUDA devices: products of candle's, and kernels for the weights.

use candle_core::{Result, Tensor};

use super::{AttentionCall, AttentionMask, NAME, Sizes};
use crate::Precision;
use crate::cuda::{self, Seen};
use crate::dropout::DeviceMask;

/// Attention of contiguous tensors.
pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, call: &AttentionCall) -> Result<Tensor> {
    let Sizes { batch, queries, keys, heads, .. } = call.sizes;
    let (kind, window) = match call.mask {
        AttentionMask::Full => (0, 0),
        AttentionMask::Causal => (1, 0),
        AttentionMask::SlidingWindow(window) => (2, window),
        AttentionMask::AntiCausal => (3, 0),
    };
    let seen = Seen { heads, queries, keys, kind, window, scale: call.scale };
    let hidden = call.hidden.as_ref().map(|hidden| {
        let numbers = hidden.iter().map(|&hidden| u8::from(hidden)).collect();
        Tensor::from_vec(numbers, (batch, keys), q.device())
    });
    let split = Split { sizes: call.sizes };
    let [own_q, own_k, own_v] = [split.queries(q)?, split.keys(k)?, split.keys(v)?];
    let precision = call.how.precision;
    let weights = precision.product(&own_q, &own_k.t()?)?;
    cuda::attention_weights(&weights, hidden.transpose()?.as_ref(), seen)?;
    let dropout =
        call.dropout.as_ref().map(|mask| mask.on_device(&[batch, heads, queries, keys], q.device()));
    let dropout = dropout.transpose()?;
    let left = dropout.as_ref().map_or(Ok(weights.clone()), |mask| cuda::dropped(&weights, mask))?;
    let mixed = split.joined(&precision.product(&left, &own_v)?, queries)?;
    let own = [own_q, own_k, own_v];
    tape::explicit_op3([q, k, v], mixed, OnCuda { split, seen, precision, own, weights, left, dropout })
}

/// Separates and joins heads. The query heads of a head of keys are rows of one matrix: nothing of the keys is repeated.
#[derive(Debug, Clone, Copy)]
struct Split {
    sizes: Sizes,
}

impl Split {
    /// (batch, queries, heads x d) to (batch x heads of keys, heads for each of these x queries, d).
    fn queries(&self, x: &Tensor) -> Result<Tensor> {
        let Sizes { batch, queries, heads, kv_heads, dims, .. } = self.sizes;
        let apart = cuda::swapped(&x.detach(), [queries, heads, dims])?;
        apart.reshape((batch * kv_heads, heads / kv_heads * queries, dims))
    }

    /// (batch, keys, heads of keys x d) to (batch x heads of keys, keys, d).
    fn keys(&self, x: &Tensor) -> Result<Tensor> {
        let Sizes { batch, keys, kv_heads, dims, .. } = self.sizes;
        let apart = cuda::swapped(&x.detach(), [keys, kv_heads, dims])?;
        apart.reshape((batch * kv_heads, keys, dims))
    }

    /// The inverse of both, for this many positions: (batch, positions, heads x d).
    fn joined(&self, x: &Tensor, positions: usize) -> Result<Tensor> {
        let Sizes { batch, dims, .. } = self.sizes;
        let heads = x.elem_count() / (batch * positions * dims);
        let together = cuda::swapped(x, [heads, positions, dims])?;
        together.reshape((batch, positions, heads * dims))
    }
}

struct OnCuda {
    split: Split,
    seen: Seen,
    precision: Precision,
    /// Queries, keys and values by head.
    own: [Tensor; 3],
    weights: Tensor,
    /// The weights after dropout.
    left: Tensor,
    dropout: Option<DeviceMask>,
}

impl tape::Backward<3> for OnCuda {
    const NAME: &'static str = NAME;

    fn backward(&self, _: [&Tensor; 3], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let Self { split, seen, precision, own: [q, k, v], weights, left, dropout } = self;
        let gradient = split.queries(&gradient.contiguous()?)?;
        let of_v = precision.product(&left.t()?, &gradient)?;
        let of_left = precision.product(&gradient, &v.t()?)?;
        let of_scores = dropout.as_ref().map_or(Ok(of_left.clone()), |mask| cuda::dropped(&of_left, mask))?;
        cuda::attention_weights_backward(weights, &of_scores, *seen)?;
        let (of_q, of_k) = (precision.product(&of_scores, k)?, precision.product(&of_scores.t()?, q)?);
        let Seen { queries, keys, .. } = *seen;
        Ok([
            Some(split.joined(&of_q, queries)?),
            Some(split.joined(&of_k, keys)?),
            Some(split.joined(&of_v, keys)?),
        ])
    }
}
