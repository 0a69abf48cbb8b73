//! Attention composed of candle's operations, for devices other than a CPU.

use candle_core::{D, Device, Tensor};

use super::super::softmax;
use super::{AttentionCall, Sizes};

pub(super) fn composed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    call: &AttentionCall,
) -> candle_core::Result<Tensor> {
    let Sizes { batch, queries, keys, heads, kv_heads, dims } = call.sizes;
    // Groups query heads by the head of keys and values that they share.
    let group = heads / kv_heads;
    let grouped = |x: &Tensor, len: usize, each: usize| {
        x.reshape((batch, len, kv_heads, each, dims))?.permute((0, 2, 3, 1, 4))
    };
    let shared = |x: &Tensor| {
        let x = grouped(x, keys, 1)?.broadcast_as((batch, kv_heads, group, keys, dims))?;
        x.reshape((batch, heads, keys, dims))?.contiguous()
    };
    let q = grouped(q, queries, group)?.reshape((batch, heads, queries, dims))?.contiguous()?;
    let scores = (q.matmul(&shared(k)?.transpose(D::Minus1, D::Minus2)?)? * call.scale)?;
    let seen = call.seen(q.device())?.broadcast_as(scores.shape())?;
    let hidden = Tensor::new(-1e9f32, q.device())?.to_dtype(q.dtype())?.broadcast_as(scores.shape())?;
    let mut weights = softmax(&seen.where_cond(&scores, &hidden)?)?;
    if call.hidden.is_some() {
        // A query that sees no key gets zeros.
        weights = (weights * seen.to_dtype(q.dtype())?)?;
    }
    if let Some(mask) = &call.dropout {
        let factors = mask.factors(&[batch, heads, queries, keys]);
        // Converted on the host: not every device has f64.
        let factors = Tensor::from_vec(factors, weights.shape(), &Device::Cpu)?.to_dtype(q.dtype())?;
        weights = (&weights * factors.to_device(q.device())?)?;
    }
    let mixed = weights.matmul(&shared(v)?)?;
    mixed.transpose(1, 2)?.reshape((batch, queries, heads * dims))
}

impl AttentionCall {
    /// 1 where a query sees a key, otherwise 0.
    fn seen(&self, device: &Device) -> candle_core::Result<Tensor> {
        let Sizes { batch, queries, keys, .. } = self.sizes;
        // Without documents all rows of the batch are alike.
        let different = if self.documents.is_some() { batch } else { 1 };
        let rows = (0..different * queries).flat_map(|row| {
            let range = self.range(row / queries, row % queries);
            (0..keys).map(move |key| u8::from(range.contains(&key)))
        });
        let shape = (different, 1, queries, keys);
        let by_position = Tensor::from_vec(rows.collect::<Vec<u8>>(), shape, device)?;
        let Some(hidden) = &self.hidden else { return Ok(by_position) };
        let seen: Vec<u8> = hidden.iter().map(|&hidden| u8::from(!hidden)).collect();
        by_position.broadcast_mul(&Tensor::from_vec(seen, (batch, 1, 1, keys), device)?)
    }
}
