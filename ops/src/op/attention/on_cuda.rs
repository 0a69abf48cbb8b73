//! Attention on CUDA devices: products of candle's, and kernels for the weights.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::{AttentionCall, AttentionMask, NAME, Sizes};
use crate::cuda::{self, DeviceMask, Seen};
use crate::dropout::Mask;
use crate::{Precision, tape};

/// Attention of contiguous tensors. Nothing of queries times keys is kept: backward computes the weights again.
pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, call: &AttentionCall) -> Result<Tensor> {
    let Sizes { batch, queries, keys, heads, .. } = call.sizes;
    let (kind, window) = match call.mask {
        AttentionMask::Full => (0, 0),
        AttentionMask::Causal => (1, 0),
        AttentionMask::SlidingWindow(window) => (2, window),
        AttentionMask::AntiCausal => (3, 0),
    };
    let hidden = |hidden: &Vec<bool>| {
        let numbers = hidden.iter().map(|&hidden| u8::from(hidden)).collect();
        Tensor::from_vec(numbers, (batch, keys), q.device())
    };
    let documents = |documents: &Vec<Range<u32>>| {
        let bounds = documents.iter().flat_map(|own| [own.start, own.end]).collect();
        Tensor::from_vec(bounds, (batch, keys, 2), q.device())
    };
    let mask = |mask: &Mask| mask.on_device(&[batch, heads, queries, keys], q.device());
    let op = OnCuda {
        split: Split { sizes: call.sizes },
        seen: Seen { heads, queries, keys, kind, window, scale: call.scale },
        hidden: call.hidden.as_ref().map(hidden).transpose()?,
        documents: call.documents.as_ref().map(documents).transpose()?,
        dropout: call.dropout.as_ref().map(mask).transpose()?,
        precision: call.how.precision,
    };
    let weights = op.dropped(op.weights(&op.split.queries(q)?, &op.split.keys(k)?)?)?;
    let mixed = op.split.joined(&op.precision.product(&weights, &op.split.keys(v)?)?, queries)?;
    tape::explicit_op3(NAME, [q, k, v], mixed, move |inputs, gradient| op.backward(inputs, gradient))
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
    /// u8 of (batch, keys).
    hidden: Option<Tensor>,
    /// u32 of (batch, keys, 2): where the document of each key begins and ends.
    documents: Option<Tensor>,
    dropout: Option<DeviceMask>,
    precision: Precision,
}

impl OnCuda {
    /// Returns the weights of the keys, for queries and keys by head.
    fn weights(&self, q: &Tensor, k: &Tensor) -> Result<Tensor> {
        let weights = self.precision.product(q, &k.t()?)?;
        cuda::attention_weights(&weights, self.hidden.as_ref(), self.documents.as_ref(), self.seen)?;
        Ok(weights)
    }

    fn dropped(&self, x: Tensor) -> Result<Tensor> {
        self.dropout.as_ref().map_or(Ok(x.clone()), |mask| cuda::dropped(&x, mask))
    }

    fn backward(&self, [q, k, v]: [&Tensor; 3], gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let Self { split, precision, seen, .. } = self;
        let [q, k, v] = [split.queries(q)?, split.keys(k)?, split.keys(v)?];
        let gradient = split.queries(&gradient.contiguous()?)?;
        let weights = self.weights(&q, &k)?;
        let of_v = precision.product(&self.dropped(weights.clone())?.t()?, &gradient)?;
        let of_scores = self.dropped(precision.product(&gradient, &v.t()?)?)?;
        cuda::attention_weights_backward(&weights, &of_scores, *seen)?;
        let (of_q, of_k) = (precision.product(&of_scores, &k)?, precision.product(&of_scores.t()?, &q)?);
        let Seen { queries, keys, .. } = *seen;
        Ok([
            Some(split.joined(&of_q, queries)?),
            Some(split.joined(&of_k, keys)?),
            Some(split.joined(&of_v, keys)?),
        ])
    }
}
