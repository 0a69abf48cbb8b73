//! Attention of several heads, from projected queries, keys and values to mixed values.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor, bail};

use super::real::{Real, max, sum, sum_pairs};
use super::{dense, softmax, with_numbers, working_dtype};
use crate::{Error, Result};

const NAME: &str = "attention";

/// Which positions a position looks at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum AttentionMask {
    /// All.
    #[default]
    Full,
    /// Itself and those before it: what a model that predicts the next token must keep to.
    Causal,
    /// Those after it. The last one, which has none, looks at all alike, and nothing is learnt of its scores.
    AntiCausal,
}

impl AttentionMask {
    /// The positions that position `at` of `len` looks at.
    fn range(self, at: usize, len: usize) -> Range<usize> {
        match self {
            Self::Full => 0..len,
            Self::Causal => 0..at + 1,
            Self::AntiCausal => at + 1..len,
        }
    }
}

/// Scaled dot-product attention: `softmax(q k' / sqrt(d)) v` for each of `num_heads` heads, which lie side by side in the last
/// dimension, d wide each. With gradients for q, k and v; no head is moved or copied.
///
/// # Shapes
/// q, k, v and the result are `(batch, length, num_heads * d)`.
///
/// # Cost
/// `2 length d` multiplications for each position and head forward, and twice that backward; for backward
/// `batch * num_heads * length^2` weights are kept.
///
/// # Errors
/// Other shapes, a last dimension of 0 or one that the heads do not divide, dtypes that differ or are not f16, bf16, f32 or f64.
///
/// # Source
/// Vaswani et al., "Attention Is All You Need" (2017), section 3.2.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use training::{AttentionMask, attention};
///
/// let x = Tensor::new(&[[[1f32, 0.], [0., 1.]]], &Device::Cpu)?; // a batch of one, two positions, two heads
/// let y = attention(&x, &x, &x, 2, AttentionMask::Causal)?;
/// assert_eq!(y.to_vec3::<f32>()?[0][0], [1.0, 0.0]); // the first position sees itself alone
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    num_heads: usize,
    visible: AttentionMask,
) -> candle_core::Result<Tensor> {
    check(q, [("k", k), ("v", v)], num_heads)?;
    let dtype = working_dtype(NAME, q.dtype())?;
    let wide = [q, k, v].map(|tensor| tensor.to_dtype(dtype)?.contiguous());
    let [q_wide, k, v] = wide;
    let (q_wide, k, v) = (q_wide?, k?, v?);
    let mixed = if q.device().is_cpu() {
        let tracked = q_wide.track_op() || k.track_op() || v.track_op();
        let saved = tracked.then(Mutex::default);
        q_wide.apply_op3(&k, &v, Attention { num_heads, visible, saved })?
    } else {
        composed(&q_wide, &k, &v, num_heads, visible)?
    };
    mixed.to_dtype(q.dtype())
}

fn check(q: &Tensor, others: [(&'static str, &Tensor); 2], num_heads: usize) -> Result<()> {
    let unfit = |tensor, expected: Vec<usize>, got: &Tensor| {
        Err(Error::Unfit { operation: NAME, tensor, expected, got: got.dims().to_vec() })
    };
    match q.dims() {
        [_, _, width] if num_heads > 0 && *width > 0 && width % num_heads == 0 => {}
        dims => {
            let multiple = |width: usize| width.div_ceil(num_heads.max(1)).max(1) * num_heads.max(1);
            let mut expected = dims.to_vec();
            expected.resize(3, 1);
            expected[2] = multiple(expected[2]);
            return unfit("q", expected, q);
        }
    }
    for (name, tensor) in others {
        if tensor.dims() != q.dims() {
            return unfit(name, q.dims().to_vec(), tensor);
        }
        if tensor.dtype() != q.dtype() {
            let (expected, got) = (q.dtype(), tensor.dtype());
            return Err(Error::OtherDType { operation: NAME, tensor: name, expected, got });
        }
    }
    Ok(())
}

fn composed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    num_heads: usize,
    visible: AttentionMask,
) -> candle_core::Result<Tensor> {
    let (batch, len, width) = q.dims3()?;
    let dims = width / num_heads;
    let heads = |x: &Tensor| x.reshape((batch, len, num_heads, dims))?.transpose(1, 2)?.contiguous();
    let scores = (heads(q)?.matmul(&heads(k)?.t()?)? / (dims as f64).sqrt())?;
    let seen = (0..len).flat_map(|at| {
        let range = visible.range(at, len);
        (0..len).map(move |other| u8::from(range.contains(&other)))
    });
    let seen = Tensor::from_vec(seen.collect::<Vec<u8>>(), (len, len), q.device())?;
    let seen = seen.broadcast_as(scores.shape())?;
    let hidden = Tensor::new(-1e9f32, q.device())?.to_dtype(q.dtype())?.broadcast_as(scores.shape())?;
    let weights = softmax(&seen.where_cond(&scores, &hidden)?)?;
    weights.matmul(&heads(v)?)?.transpose(1, 2)?.reshape((batch, len, width))
}

struct Attention {
    num_heads: usize,
    visible: AttentionMask,
    /// What each position takes of each, head by head, where backward will ask for it.
    saved: Option<Mutex<Option<CpuStorage>>>,
}

/// Where things lie in a dense tensor.
#[derive(Clone, Copy)]
struct Place {
    len: usize,
    width: usize,
    dims: usize,
    batch: usize,
    head: usize,
}

impl Place {
    /// One head's numbers of one position.
    fn of(self, position: usize) -> Range<usize> {
        let start = (self.batch * self.len + position) * self.width + self.head * self.dims;
        start..start + self.dims
    }

    /// One position's weights in one head.
    fn weights(self, position: usize) -> Range<usize> {
        let heads = self.width / self.dims;
        let start = ((self.batch * heads + self.head) * self.len + position) * self.len;
        start..start + self.len
    }

    /// Every head of every batch.
    fn all(dims: &[usize], num_heads: usize) -> impl Iterator<Item = Place> {
        let (len, width) = (dims[1], dims[2]);
        let place = move |batch, head| Place { len, width, dims: width / num_heads, batch, head };
        (0..dims[0]).flat_map(move |batch| (0..num_heads).map(move |head| place(batch, head)))
    }
}

impl Attention {
    /// Mixed values and weights.
    fn forward<T: Real>(&self, q: &[T], k: &[T], v: &[T], dims: &[usize]) -> (Vec<T>, Vec<T>) {
        let mut out = vec![T::zero(); v.len()];
        let mut weights = vec![T::zero(); dims[0] * self.num_heads * dims[1] * dims[1]];
        for place in Place::all(dims, self.num_heads) {
            let scale = T::from_f64(1.0 / (place.dims as f64).sqrt());
            for at in 0..place.len {
                let row = &mut weights[place.weights(at)];
                let seen = self.visible.range(at, place.len);
                if seen.is_empty() {
                    row.fill(T::from_f64(1.0 / place.len as f64));
                } else {
                    let query = &q[place.of(at)];
                    let scores = &mut row[seen.clone()];
                    scores
                        .iter_mut()
                        .zip(seen)
                        .for_each(|(s, other)| *s = dot(query, &k[place.of(other)]) * scale);
                    let top = max(scores);
                    scores.iter_mut().for_each(|s| *s = (*s - top).exp_down());
                    let share = T::one() / sum(scores, |s| s);
                    scores.iter_mut().for_each(|s| *s *= share);
                }
                let mixed = &mut out[place.of(at)];
                row.iter().enumerate().for_each(|(other, &w)| add(mixed, w, &v[place.of(other)]));
            }
        }
        (out, weights)
    }

    /// Gradients of q, k and v.
    fn backward<T: Real>(&self, [q, k, v, g]: [&[T]; 4], weights: &[T], dims: &[usize]) -> [Vec<T>; 3] {
        let zeros = || vec![T::zero(); q.len()];
        let (mut of_q, mut of_k, mut of_v) = (zeros(), zeros(), zeros());
        let mut of_scores = vec![T::zero(); dims[1]];
        for place in Place::all(dims, self.num_heads) {
            let scale = T::from_f64(1.0 / (place.dims as f64).sqrt());
            for at in 0..place.len {
                let (row, gradient) = (&weights[place.weights(at)], &g[place.of(at)]);
                row.iter().enumerate().for_each(|(other, &w)| add(&mut of_v[place.of(other)], w, gradient));
                let seen = self.visible.range(at, place.len);
                let (row, of_scores) = (&row[seen.clone()], &mut of_scores[seen.clone()]);
                for (s, other) in of_scores.iter_mut().zip(seen.clone()) {
                    *s = dot(gradient, &v[place.of(other)]);
                }
                let mean = sum_pairs(row, of_scores, |w, s| w * s);
                for ((s, &w), other) in of_scores.iter_mut().zip(row).zip(seen) {
                    *s = w * (*s - mean) * scale;
                    add(&mut of_q[place.of(at)], *s, &k[place.of(other)]);
                    add(&mut of_k[place.of(other)], *s, &q[place.of(at)]);
                }
            }
        }
        [of_q, of_k, of_v]
    }

    fn mixed<T: Real>(&self, parts: [(&CpuStorage, &Layout); 3]) -> candle_core::Result<CpuStorage> {
        let [q, k, v] = parts.map(|(storage, layout)| dense::<T>(storage, layout));
        let (out, weights) = self.forward(q?, k?, v?, parts[0].1.dims());
        if let Some(saved) = &self.saved {
            *saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(T::to_cpu_storage_owned(weights));
        }
        Ok(T::to_cpu_storage_owned(out))
    }

    fn gradients<T: Real>(&self, tensors: [&Tensor; 4]) -> candle_core::Result<[Tensor; 3]> {
        let dims = tensors[0].dims();
        let saved = self.saved.as_ref().map(|s| s.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let [q, k, v, g] = tensors;
        let found = with_numbers(q, |q| {
            with_numbers(k, |k| {
                with_numbers(v, |v| {
                    with_numbers(g, |g| {
                        let weights = match saved.flatten() {
                            Some(saved) => T::cpu_storage_data(saved)?,
                            None => self.forward::<T>(q, k, v, dims).1,
                        };
                        Ok(self.backward([q, k, v, g], &weights, dims))
                    })
                })
            })
        })?;
        let [of_q, of_k, of_v] = found.map(|numbers| Tensor::from_vec(numbers, dims, g.device()));
        Ok([of_q?, of_k?, of_v?])
    }
}

/// The sum of products; the heads of small models are shorter than the lanes of [`sum_pairs`].
#[inline(always)]
fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    if a.len() >= 32 {
        return sum_pairs(a, b, |a, b| a * b);
    }
    a.iter().zip(b).fold(T::zero(), |sum, (&a, &b)| sum + a * b)
}

/// Adds a multiple.
#[inline(always)]
fn add<T: Real>(to: &mut [T], factor: T, from: &[T]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to += factor * from);
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let parts = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let out = match q {
            CpuStorage::F32(_) => self.mixed::<f32>(parts)?,
            CpuStorage::F64(_) => self.mixed::<f64>(parts)?,
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((out, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let [of_q, of_k, of_v] = match q.dtype() {
            DType::F32 => self.gradients::<f32>([q, k, v, &gradient])?,
            _ => self.gradients::<f64>([q, k, v, &gradient])?,
        };
        Ok((Some(of_q), Some(of_k), Some(of_v)))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// What other devices compute is the same, gradients included.
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        for (visible, num_heads, width) in [
            (AttentionMask::Full, 1, 3),
            (AttentionMask::Causal, 3, 12),
            (AttentionMask::AntiCausal, 2, 80),
            (AttentionMask::AntiCausal, 4, 4),
        ] {
            let random = || Var::from_tensor(&Tensor::randn(0f64, 2., (2, 7, width), &Device::Cpu)?);
            let (q, k, v, outer) = (random()?, random()?, random()?, random()?);
            let both =
                [composed(&q, &k, &v, num_heads, visible)?, attention(&q, &k, &v, num_heads, visible)?];
            let loss = |y: &Tensor| (y * outer.as_detached_tensor())?.sum_all();
            let what = format!("{visible:?}, {num_heads} heads of {width}");
            assert_agree(both, loss, &[&q, &k, &v], 1e-12, &what)?;
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let x = zeros(&[1, 2, 6]);
        let line = |result: candle_core::Result<Tensor>| result.unwrap_err().to_string();
        let of = |q: &Tensor, k: &Tensor, heads| line(attention(q, k, q, heads, AttentionMask::Full));
        assert_eq!(of(&x, &x, 4), "attention: q must be of shape [1, 2, 8], got [1, 2, 6]");
        assert_eq!(of(&x, &zeros(&[1, 3, 6]), 2), "attention: k must be of shape [1, 2, 6], got [1, 3, 6]");
        assert!(of(&x, &x, 0).contains("q must be of shape"));
        assert!(of(&zeros(&[6]), &zeros(&[6]), 2).contains("q must be of shape"));
        let none = zeros(&[1, 2, 0]);
        assert_eq!(of(&none, &none, 3), "attention: q must be of shape [1, 2, 3], got [1, 2, 0]");
        assert!(
            attention(&zeros(&[0, 2, 6]), &zeros(&[0, 2, 6]), &zeros(&[0, 2, 6]), 2, AttentionMask::Causal)
                .is_ok()
        );
    }
}
