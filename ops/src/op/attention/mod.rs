//! Multi-head attention on projected queries, keys and values.

mod composed;
mod divided;
mod fused;
mod mask;
mod on_cuda;

use std::ops::Range;

use candle_core::{DType, Tensor};

pub use mask::AttentionMask;

use self::composed::composed;
use self::divided::SeenPart;
use self::fused::Fused;
use super::cast::cast;
use super::working_dtype;
use crate::dropout::Mask;
use crate::product::ProductConfig;
use crate::recompute::{keep_results, keeps_results, known_results};
use crate::{Documents, Dropout, Error, Result, RowContext, SavedBytes, cuda, tape};

const NAME: &str = "attention";

/// Configuration of [`attention`].
#[derive(Debug, Clone, Default)]
pub struct AttentionConfig {
    /// Number of query heads, which are adjacent in the last dimension.
    pub num_heads: usize,
    /// Number of key and value heads if there are fewer (grouped-query attention): a divisor of `num_heads`; each
    /// serves a group of adjacent query heads. Default: `num_heads`.
    pub num_kv_heads: Option<usize>,
    /// Which keys a query sees. Default: all.
    pub mask: AttentionMask,
    /// Factor of the scores. Default: `1 / sqrt(d)`, d the width of a head.
    pub scale: Option<f64>,
    /// Dropout of the attention weights; set it in training only, unless it is [by row](Dropout::by_row). Default:
    /// none.
    pub dropout: Option<Dropout>,
}

impl AttentionConfig {
    /// A configuration with as many key and value heads as query heads, and a mask.
    pub fn new(num_heads: usize, mask: AttentionMask) -> Self {
        Self { num_heads, mask, ..Self::default() }
    }

    /// Number of query heads, and of key and value heads.
    pub(crate) fn heads(&self) -> Result<(usize, usize)> {
        let (heads, kv_heads) = (self.num_heads, self.num_kv_heads.unwrap_or(self.num_heads));
        if heads == 0 {
            return invalid("num_heads", heads, "there must be a head at least");
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return invalid("num_kv_heads", kv_heads, "it must divide num_heads");
        }
        Ok((heads, kv_heads))
    }
}

pub(super) fn invalid<T>(field: &'static str, got: usize, help: &'static str) -> Result<T> {
    Err(Error::InvalidConfig { of: "AttentionConfig", field, got: got as f64, help })
}

/// Scaled dot-product attention: `softmax(scale q k') v` for each head, with gradients for q, k and v. On a CPU, q, k
/// and v are not copied as a whole to separate their heads.
///
/// With fewer queries than keys (a key-value cache), the last query is at the position of the last key. In a scope of
/// [`Documents`] a query sees the keys of its own document alone. Of [`DividedRows`](crate::DividedRows) a rank gives the queries,
/// keys and values of its places, and its queries see the keys of all ranks.
///
/// # Shapes
/// q and the result are `(batch, queries, num_heads * d)`, k and v `(batch, keys, num_kv_heads * d)`.
///
/// # Cost
/// `2 d` multiplications for each query, head and key that it sees, and 2.5 times that backward. On a CPU it works in
/// blocks, all heads in parallel; blocks that are masked entirely, also those of other documents, are skipped. Memory is linear in the length:
/// besides the result one number per query and head is kept, and each thread has a block of scores. The bits do not
/// depend on the number of threads. On CUDA devices the scores of all heads exist for a while, forward and backward, but are
/// not kept; on other devices they are. Of divided rows a rank sends and receives, forward and backward, the keys and values
/// that are seen elsewhere, and in backward their gradients; they arrive while others are computed with, and are not kept.
///
/// # Errors
/// Other shapes, a last dimension that is 0 or not divisible by the heads, dtypes that differ or are not f16, bf16,
/// f32 or f64; fewer keys than queries with a mask; a window of 0; [`Documents`] of other rows, or with
/// [`AttentionMask::AntiCausal`]; of divided rows other queries or keys than those of a rank's places,
/// [`AttentionMask::AntiCausal`], a device that is no CPU.
///
/// # Source
/// Vaswani et al., "Attention Is All You Need" (2017), section 3.2; Dao, "FlashAttention-2" (2023), algorithms 1 and
/// 2; Ainslie et al., "GQA" (2023); Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
/// Context" (2023).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::{AttentionConfig, AttentionMask, attention};
///
/// let x = Tensor::new(&[[[1f32, 0.], [0., 1.]]], &Device::Cpu)?; // a batch of one, two positions, two heads
/// let y = attention(&x, &x, &x, &AttentionConfig::new(2, AttentionMask::Causal))?;
/// assert_eq!(y.to_vec3::<f32>()?[0][0], [1.0, 0.0]); // the first position sees itself alone
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> candle_core::Result<Tensor> {
    attention_with(q, k, v, None, config)
}

/// [`attention`] in which some keys (padding) are hidden from all queries of their batch row. A query that sees no
/// key at all gets zeros.
///
/// # Shapes
/// As [`attention`]; `key_mask`, of u8, is `(batch, keys)`: 0 hides a key. Of divided rows it is of
/// this rank's keys, and sent to the other ranks.
///
/// # Errors
/// As [`attention`]; a mask of another shape or dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::{AttentionConfig, AttentionMask, attention_with_key_mask};
///
/// let x = Tensor::new(&[[[1f32], [2.]], [[3.], [4.]]], &Device::Cpu)?;
/// let seen = Tensor::new(&[[1u8, 0], [0, 0]], &Device::Cpu)?;
/// let y = attention_with_key_mask(&x, &x, &x, &seen, &AttentionConfig::new(1, AttentionMask::Full))?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, 1.0, 0.0, 0.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention_with_key_mask(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    key_mask: &Tensor,
    config: &AttentionConfig,
) -> candle_core::Result<Tensor> {
    attention_with(q, k, v, Some(key_mask), config)
}

/// Sizes derived from the shapes of queries and keys.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    /// Width of a head.
    dims: usize,
}

/// Parameters of one call, after validation.
#[derive(Debug)]
struct AttentionCall {
    sizes: Sizes,
    mask: AttentionMask,
    scale: f64,
    /// For each key of each batch row, whether it is hidden.
    hidden: Option<Vec<bool>>,
    /// For each key of each batch row, the keys of its document.
    documents: Option<Vec<Range<u32>>>,
    /// Dropout mask of the weights (batch, heads, queries, keys).
    dropout: Option<Mask>,
    /// With the keys of one rank, if rows are divided: which of them each query sees. `mask` and `documents` are not used then.
    part: Option<SeenPart>,
    how: ProductConfig,
}

pub(super) fn attention_with(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    key_mask: Option<&Tensor>,
    config: &AttentionConfig,
) -> candle_core::Result<Tensor> {
    let sizes = check(q, [("k", k), ("v", v)], config)?;
    let hidden = key_mask.map(|mask| hidden(mask, &sizes)).transpose()?;
    let scale = config.scale.unwrap_or(1.0 / (sizes.dims as f64).sqrt());
    let rows = RowContext::current().divided;
    // Places of the whole rows.
    let [queries, keys] = match &rows {
        Some(rows) => [rows.len(); 2],
        None => [sizes.queries, sizes.keys],
    };
    let dropout = match &config.dropout {
        Some(dropout) if q.elem_count() > 0 => dropout.mask(sizes.batch, queries)?,
        _ => None,
    };
    let (documents, mask) = (documents([sizes.batch, queries, keys], config.mask)?, config.mask);
    let (how, part) = (ProductConfig::current(), None);
    let mut call = AttentionCall { sizes, mask, scale, hidden, documents, dropout, part, how };
    if let Some(rows) = &rows {
        divided::check(&call, q.device().is_cpu(), rows)?;
    }
    if cuda::knows(q) && cuda::knows(k) {
        return on_cuda::attention(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?, &call);
    }
    call.how = ProductConfig::of(q.dtype());
    let dtype = working_dtype(NAME, q.dtype())?;
    let wide = |tensor: &Tensor| cast(tensor, dtype)?.contiguous();
    let (wide_q, k, v) = (wide(q)?, wide(k)?, wide(v)?);
    if let Some(rows) = &rows {
        return cast(&divided::attention([&wide_q, &k, &v], q.dtype(), &call, rows)?, q.dtype());
    }
    if !q.device().is_cpu() {
        return composed(&wide_q, &k, &v, &call)?.to_dtype(q.dtype());
    }
    let tracked = wide_q.track_op() || k.track_op() || v.track_op() || keeps_results();
    let log_sums = if tracked { sizes.batch * sizes.heads * sizes.queries } else { 0 };
    let kept = SavedBytes::default();
    let fused = Fused::new(call, tracked, kept.clone(), known_results());
    let sums = fused.log_sums();
    let mixed = tape::apply_op3(&wide_q, &k, &v, fused)?;
    kept.by(&mixed, log_sums * dtype.size_in_bytes());
    keep_results(|| Ok(vec![mixed.detach(), sums.to_tensor()?]))?;
    cast(&mixed, q.dtype())
}

fn hidden(mask: &Tensor, sizes: &Sizes) -> candle_core::Result<Vec<bool>> {
    let expected = [sizes.batch, sizes.keys];
    if mask.dims() != expected {
        let (expected, got) = (expected.to_vec(), mask.dims().to_vec());
        return Err(Error::ShapeMismatch { operation: NAME, tensor: "key_mask", expected, got }.into());
    }
    if mask.dtype() != DType::U8 {
        let (expected, got) = (DType::U8, mask.dtype());
        return Err(Error::DTypeMismatch { operation: NAME, tensor: "key_mask", expected, got }.into());
    }
    Ok(mask.flatten_all()?.to_vec1::<u8>()?.iter().map(|&seen| seen == 0).collect())
}

/// The keys of each key's document, in a scope of documents.
fn documents([batch, queries, keys]: [usize; 3], mask: AttentionMask) -> Result<Option<Vec<Range<u32>>>> {
    let Some(documents) = Documents::current() else { return Ok(None) };
    let problem = match mask {
        AttentionMask::AntiCausal => {
            "AttentionMask::AntiCausal is not for packed rows; use another mask".into()
        }
        _ if queries > keys => {
            format!("{queries} queries, {keys} keys: give a key for each place")
        }
        _ => return documents.of_rows(NAME, [batch, keys]).map(Some),
    };
    Err(Error::UnfitDocuments { operation: NAME, problem })
}

fn check(q: &Tensor, others: [(&'static str, &Tensor); 2], config: &AttentionConfig) -> Result<Sizes> {
    let unfit = |tensor, expected: Vec<usize>, got: &Tensor| {
        Err(Error::ShapeMismatch { operation: NAME, tensor, expected, got: got.dims().to_vec() })
    };
    let (heads, kv_heads) = config.heads()?;
    if config.mask == AttentionMask::SlidingWindow(0) {
        return invalid("mask", 0, "a window holds one position at least, the query's own");
    }
    let &[batch, queries, width] = q.dims() else {
        let mut expected = q.dims().to_vec();
        expected.resize(3, heads);
        return unfit("q", expected, q);
    };
    if width == 0 || !width.is_multiple_of(heads) {
        return unfit("q", vec![batch, queries, width.div_ceil(heads).max(1) * heads], q);
    }
    let dims = width / heads;
    let keys = others[0].1.dims().get(1).copied().unwrap_or_default();
    // With a mask, there must be at least as many keys as queries.
    let keys = if config.mask == AttentionMask::Full { keys } else { keys.max(queries) };
    for (name, tensor) in others {
        if tensor.dims() != [batch, keys, kv_heads * dims] {
            return unfit(name, vec![batch, keys, kv_heads * dims], tensor);
        }
        if tensor.dtype() != q.dtype() {
            let (expected, got) = (q.dtype(), tensor.dtype());
            return Err(Error::DTypeMismatch { operation: NAME, tensor: name, expected, got });
        }
    }
    Ok(Sizes { batch, queries, keys, heads, kv_heads, dims })
}

#[cfg(test)]
mod tests;
