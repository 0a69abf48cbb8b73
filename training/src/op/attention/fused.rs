//! Attention in blocks of queries on a CPU: products through `gemm`, all heads in parallel, no matrix of queries by keys.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Shape, Tensor, bail};
use rayon::prelude::*;

use super::super::real::{Real, ln, max, sum, sum_pairs};
use super::super::{dense, with_numbers};
use super::{Call, NAME, Sizes};
use crate::Kept;
use crate::product::{Matrix, multiply};
use crate::recompute::copied;
use crate::vectors::vectorized;

/// Queries and keys of a block: its scores, with those of backward, fit the caches of a core.
const QUERIES: usize = 64;
const KEYS: usize = 512;

/// Multiplications below which other threads are not woken.
const SMALL: usize = 1 << 18;

pub(super) struct Fused {
    call: Call,
    /// Backward will follow.
    tracked: bool,
    /// The logarithm of each query's sum of exponentials, head by head, for backward.
    log_sums: LogSums,
    /// What was mixed, and those sums, where they were computed before.
    known: Option<Vec<Tensor>>,
    #[expect(dead_code, reason = "it is there as long as this is")]
    kept: Kept,
}

/// Queries, keys and values; backward also the result and its gradient.
type Inputs<'a, T, const N: usize> = [&'a [T]; N];

/// Sums of exponentials, once they are computed.
#[derive(Clone, Default)]
pub(super) struct LogSums(Arc<Mutex<Option<CpuStorage>>>);

impl LogSums {
    fn lock(&self) -> MutexGuard<'_, Option<CpuStorage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of them.
    pub(super) fn to_tensor(&self) -> candle_core::Result<Tensor> {
        match &*self.lock() {
            Some(CpuStorage::F32(sums)) => Tensor::new(&sums[..], &Device::Cpu),
            Some(CpuStorage::F64(sums)) => Tensor::new(&sums[..], &Device::Cpu),
            _ => bail!("{NAME}: backward before forward"),
        }
    }
}

impl Fused {
    pub(super) fn new(call: Call, tracked: bool, kept: Kept, known: Option<Vec<Tensor>>) -> Self {
        Self { call, tracked, log_sums: LogSums::default(), known, kept }
    }

    pub(super) fn log_sums(&self) -> LogSums {
        self.log_sums.clone()
    }

    fn mixed<T: Real>(&self, parts: [(&CpuStorage, &Layout); 3]) -> candle_core::Result<CpuStorage> {
        if let Some([mixed, sums]) = self.known.as_deref()
            && mixed.shape() == parts[0].1.shape()
        {
            *self.log_sums.lock() = Some(copied(sums)?.0);
            return Ok(copied(mixed)?.0);
        }
        let [q, k, v] = parts.map(|(storage, layout)| dense::<T>(storage, layout));
        let (mixed, log_sums) = self.call.forward([q?, k?, v?])?;
        let log_sums = self.tracked.then(|| T::to_cpu_storage_owned(log_sums));
        *self.log_sums.lock() = log_sums;
        Ok(T::to_cpu_storage_owned(mixed))
    }

    fn gradients<T: Real>(&self, tensors: [&Tensor; 5]) -> candle_core::Result<[Option<Tensor>; 3]> {
        let saved = self.log_sums.lock();
        let Some(log_sums) = &*saved else { bail!("{NAME}: backward before forward") };
        let log_sums = T::cpu_storage_as_slice(log_sums)?;
        let [q, k, v, mixed, gradient] = tensors;
        let found = with_numbers(q, |q| {
            with_numbers(k, |k| {
                with_numbers(v, |v| {
                    with_numbers(mixed, |mixed| {
                        with_numbers(gradient, |g| self.call.backward([q, k, v, mixed, g], log_sums))
                    })
                })
            })
        })?;
        let of = |numbers, like: &Tensor| Tensor::from_vec(numbers, like.shape(), like.device()).map(Some);
        let [of_q, of_k, of_v] = found;
        Ok([of(of_q, q)?, of(of_k, k)?, of(of_v, v)?])
    }
}

impl Sizes {
    /// One head's rows of a tensor with `len` positions and `heads` heads.
    fn head<T>(self, numbers: &[T], index: usize, len: usize, heads: usize) -> Matrix<'_, T> {
        let start = index / heads * len * heads * self.dims + index % heads * self.dims;
        Matrix::new(numbers.get(start..).unwrap_or_default(), len, self.dims, heads * self.dims)
    }

    /// Puts heads, which lie one after the other, side by side.
    fn side_by_side<T: Real>(self, apart: Vec<T>, len: usize, heads: usize) -> Vec<T> {
        if heads == 1 || len == 1 {
            return apart;
        }
        let mut out = Vec::with_capacity(apart.len());
        for batch in apart.chunks_exact((heads * len * self.dims).max(1)) {
            for position in 0..len {
                for head in batch.chunks_exact(len * self.dims) {
                    out.extend_from_slice(&head[position * self.dims..(position + 1) * self.dims]);
                }
            }
        }
        out
    }

    /// Scores of a block, at most.
    fn scores(self) -> usize {
        self.queries.min(QUERIES) * self.keys.min(KEYS)
    }

    fn is_small(self) -> bool {
        let products = [self.batch, self.heads, self.queries, self.keys, self.dims];
        products.into_iter().fold(1, usize::saturating_mul) < SMALL
    }
}

impl Call {
    /// The mixed values, and the logarithm of each query's sum of exponentials, head by head.
    fn forward<T: Real>(&self, inputs: Inputs<'_, T, 3>) -> candle_core::Result<(Vec<T>, Vec<T>)> {
        let sizes @ Sizes { batch, queries, heads, dims, .. } = self.sizes;
        let mut mixed = vec![T::zero(); batch * heads * queries * dims];
        let mut log_sums = vec![T::zero(); batch * heads * queries];
        let (each, few) = ((queries * dims).max(1), queries.max(1));
        let one = |scratch: &mut [Vec<T>; 2], (index, (out, sums)): (usize, (&mut [T], &mut [T]))| {
            self.forward_head(index, inputs, out, sums, scratch)
        };
        if sizes.is_small() {
            let mut scratch = Default::default();
            let mut heads = mixed.chunks_mut(each).zip(log_sums.chunks_mut(few)).enumerate();
            heads.try_for_each(|head| one(&mut scratch, head))?;
        } else {
            let heads = mixed.par_chunks_mut(each).zip(log_sums.par_chunks_mut(few)).enumerate();
            heads.try_for_each_init(Default::default, one)?;
        }
        Ok((sizes.side_by_side(mixed, queries, heads), log_sums))
    }

    fn forward_head<T: Real>(
        &self,
        index: usize,
        [q, k, v]: Inputs<'_, T, 3>,
        out: &mut [T],
        log_sums: &mut [T],
        [scores, k_by_dims]: &mut [Vec<T>; 2],
    ) -> candle_core::Result<()> {
        let sizes @ Sizes { queries, keys, heads, kv_heads, dims, .. } = self.sizes;
        let shared = index / (heads / kv_heads);
        let q = sizes.head(q, index, queries, heads);
        let (k, v) = (sizes.head(k, shared, keys, kv_heads), sizes.head(v, shared, keys, kv_heads));
        scores.resize(sizes.scores(), T::zero());
        k.transpose_into(k_by_dims);
        let k_by_dims = Matrix::new(k_by_dims, dims, keys, keys);
        let blocks = out.chunks_mut(QUERIES * dims).zip(log_sums.chunks_mut(QUERIES));
        for (at, (out, log_sums)) in blocks.enumerate() {
            let rows = at * QUERIES..at * QUERIES + log_sums.len();
            let mut running = Running::new();
            for block in self.blocks(index, rows.clone()) {
                let seen = block.seen.clone();
                let scores = &mut scores[..rows.len() * seen.len()];
                let pair = (q.rows(rows.clone()), k_by_dims.columns(seen.clone()));
                multiply(scores, pair, T::from_f64(self.scale), false, self.how)?;
                vectorized!({ self.weigh(scores, &block, &mut running, out) });
                let weights = Matrix::new(&*scores, rows.len(), seen.len(), seen.len());
                multiply(out, (weights, v.rows(seen)), T::one(), true, self.how)?;
            }
            running.finish(out, log_sums);
        }
        Ok(())
    }

    /// Gradients of queries, keys and values.
    fn backward<T: Real>(
        &self,
        inputs: Inputs<'_, T, 5>,
        log_sums: &[T],
    ) -> candle_core::Result<[Vec<T>; 3]> {
        let sizes @ Sizes { batch, queries, keys, heads, kv_heads, dims } = self.sizes;
        let mut of_q = vec![T::zero(); batch * heads * queries * dims];
        let mut of_k = vec![T::zero(); batch * kv_heads * keys * dims];
        let mut of_v = of_k.clone();
        let (group, each) = ((heads / kv_heads * queries * dims).max(1), (keys * dims).max(1));
        let one = |scratch: &mut [Vec<T>; 4], (index, ((q, k), v)): (usize, ((&mut [T], _), _))| {
            self.backward_group(index, inputs, log_sums, [q, k, v], scratch)
        };
        if sizes.is_small() {
            let mut scratch = Default::default();
            let parts = of_q.chunks_mut(group).zip(of_k.chunks_mut(each)).zip(of_v.chunks_mut(each));
            parts.enumerate().try_for_each(|part| one(&mut scratch, part))?;
        } else {
            let parts = of_q.par_chunks_mut(group).zip(of_k.par_chunks_mut(each));
            let parts = parts.zip(of_v.par_chunks_mut(each)).enumerate();
            parts.try_for_each_init(Default::default, one)?;
        }
        Ok([
            sizes.side_by_side(of_q, queries, heads),
            sizes.side_by_side(of_k, keys, kv_heads),
            sizes.side_by_side(of_v, keys, kv_heads),
        ])
    }

    /// Of one head of keys and values, and of the heads of queries that it serves.
    fn backward_group<T: Real>(
        &self,
        group: usize,
        [q, k, v, mixed, gradient]: Inputs<'_, T, 5>,
        log_sums: &[T],
        [of_q, of_k, of_v]: [&mut [T]; 3],
        [weights, of_scores, k_by_dims, v_by_dims]: &mut [Vec<T>; 4],
    ) -> candle_core::Result<()> {
        let sizes @ Sizes { queries, keys, heads, kv_heads, dims, .. } = self.sizes;
        let (k, v) = (sizes.head(k, group, keys, kv_heads), sizes.head(v, group, keys, kv_heads));
        weights.resize(sizes.scores(), T::zero());
        of_scores.resize(sizes.scores(), T::zero());
        k.transpose_into(k_by_dims);
        v.transpose_into(v_by_dims);
        let by_dims = [k_by_dims, v_by_dims].map(|x| Matrix::new(&*x, dims, keys, keys));
        let (scale, one) = (T::from_f64(self.scale), T::one());
        for (member, of_q) in of_q.chunks_mut(queries * dims).enumerate() {
            let index = group * (heads / kv_heads) + member;
            let of_head = [q, mixed, gradient].map(|x| sizes.head(x, index, queries, heads));
            for (at, of_q) in of_q.chunks_mut(QUERIES * dims).enumerate() {
                let rows = at * QUERIES..at * QUERIES + of_q.len() / dims;
                let [q, mixed, gradient] = of_head.map(|x| x.rows(rows.clone()));
                let log_sums = &log_sums[index * queries + rows.start..index * queries + rows.end];
                for block in self.blocks(index, rows.clone()) {
                    let (m, n, seen) = (rows.len(), block.seen.len(), block.seen.clone());
                    let [k_by_dims, v_by_dims] = by_dims.map(|x| x.columns(seen.clone()));
                    let (weights, of_scores) = (&mut weights[..m * n], &mut of_scores[..m * n]);
                    multiply(weights, (q, k_by_dims), scale, false, self.how)?;
                    multiply(of_scores, (gradient, v_by_dims), one, false, self.how)?;
                    vectorized!({
                        self.weigh_again(weights, of_scores, &block, log_sums, [mixed, gradient])
                    });
                    let whole = |numbers| Matrix::new(numbers, m, n, n);
                    let part = seen.start * dims..seen.end * dims;
                    multiply(&mut of_v[part.clone()], (whole(&*weights).t(), gradient), one, true, self.how)?;
                    multiply(&mut of_k[part], (whole(&*of_scores).t(), q), scale, true, self.how)?;
                    multiply(of_q, (whole(&*of_scores), k.rows(seen)), scale, true, self.how)?;
                }
            }
        }
        Ok(())
    }

    /// Blocks of the keys that some queries of a head see.
    fn blocks(&self, index: usize, rows: Range<usize>) -> impl Iterator<Item = Block> + use<> {
        let seen = self.mask.union(rows.clone(), self.sizes.queries, self.sizes.keys);
        let (first, end) = (rows.start, seen.end);
        seen.step_by(KEYS).map(move |start| Block { index, first, seen: start..end.min(start + KEYS) })
    }

    /// Makes of a block's scores the exponentials that weights are in proportion to, and of what is mixed so far the same
    /// proportion.
    #[inline(always)]
    fn weigh<T: Real>(&self, scores: &mut [T], block: &Block, running: &mut Running<T>, mixed: &mut [T]) {
        let rows = scores.chunks_exact_mut(block.seen.len()).zip(mixed.chunks_exact_mut(self.sizes.dims));
        let states = running.top.iter_mut().zip(&mut running.total);
        for (at, ((row, mixed), (top, total))) in rows.zip(states).enumerate() {
            match self.own(block, at) {
                None => {
                    row.fill(self.alike());
                    (*top, *total) = (T::zero(), T::one());
                }
                Some(own) => {
                    self.hide(row, block, own.clone());
                    let seen = &mut row[own];
                    let highest = max(seen);
                    let highest = if highest > *top { highest } else { *top };
                    // What is not a number is not hidden, and shows in the result.
                    let all_hidden = || self.hidden.is_some() && seen.iter().all(|x| *x == T::NEG_INFINITY);
                    if highest == T::NEG_INFINITY && (seen.is_empty() || all_hidden()) {
                        seen.fill(T::zero());
                        continue;
                    }
                    if highest > *top {
                        let factor = (*top - highest).exp_down();
                        mixed.iter_mut().for_each(|x| *x *= factor);
                        (*top, *total) = (highest, *total * factor);
                    }
                    seen.iter_mut().for_each(|x| *x = (*x - highest).exp_down());
                    *total += sum(seen, |x| x);
                }
            }
            self.drop_some(row, block, at);
        }
    }

    /// Makes of a block's scores the weights, and of the gradients of weights those of scores, but for the scale.
    #[inline(always)]
    fn weigh_again<T: Real>(
        &self,
        weights: &mut [T],
        of_scores: &mut [T],
        block: &Block,
        log_sums: &[T],
        [mixed, gradient]: [Matrix<'_, T>; 2],
    ) {
        let width = block.seen.len();
        let rows = weights.chunks_exact_mut(width).zip(of_scores.chunks_exact_mut(width)).zip(log_sums);
        for (at, ((row, of_row), &log_sum)) in rows.enumerate() {
            let own = match self.own(block, at) {
                None => {
                    row.fill(self.alike());
                    0..0
                }
                Some(own) => {
                    self.hide(row, block, own.clone());
                    let seen = &mut row[own.clone()];
                    if log_sum == T::NEG_INFINITY && self.hidden.is_some() {
                        seen.fill(T::zero());
                    } else {
                        seen.iter_mut().for_each(|x| *x = (*x - log_sum).exp_down());
                    }
                    own
                }
            };
            self.drop_some(of_row, block, at);
            let mean = sum_pairs(mixed.row(at), gradient.row(at), |o, g| o * g);
            of_row[..own.start].fill(T::zero());
            of_row[own.end..].fill(T::zero());
            of_row[own.clone()].iter_mut().zip(&row[own]).for_each(|(s, &w)| *s = w * (*s - mean));
            self.drop_some(row, block, at);
        }
    }

    /// The weight of each key for a query that sees none.
    fn alike<T: Real>(&self) -> T {
        if self.hidden.is_some() { T::zero() } else { T::from_f64(1.0 / self.sizes.keys as f64) }
    }

    /// Which of the block's keys the query of its row `at` sees, and `None` for a query that sees no key at all.
    #[inline(always)]
    fn own(&self, block: &Block, at: usize) -> Option<Range<usize>> {
        let own = self.mask.range(block.first + at, self.sizes.queries, self.sizes.keys);
        let within = |key: usize| key.clamp(block.seen.start, block.seen.end) - block.seen.start;
        (!own.is_empty()).then(|| within(own.start)..within(own.end))
    }

    /// Zeroes what a query does not see, and lets what is hidden in between weigh nothing.
    #[inline(always)]
    fn hide<T: Real>(&self, row: &mut [T], block: &Block, own: Range<usize>) {
        row[..own.start].fill(T::zero());
        row[own.end..].fill(T::zero());
        if let Some(hidden) = &self.hidden {
            let first = block.index / self.sizes.heads * self.sizes.keys + block.seen.start;
            for (x, &hidden) in row[own.clone()].iter_mut().zip(&hidden[first + own.start..]) {
                *x = if hidden { T::NEG_INFINITY } else { *x };
            }
        }
    }

    #[inline(always)]
    fn drop_some<T: Real>(&self, row: &mut [T], block: &Block, at: usize) {
        if let Some(mask) = &self.dropout {
            let Sizes { queries, keys, .. } = self.sizes;
            let first = (block.index * queries + block.first + at) * keys + block.seen.start;
            row.iter_mut().zip(first as u64..).for_each(|(x, index)| *x *= T::from_f64(mask.factor(index)));
        }
    }
}

/// Which scores a block has.
struct Block {
    /// The head, counted over the batch.
    index: usize,
    /// Its first query.
    first: usize,
    /// Its keys.
    seen: Range<usize>,
}

/// What is known of the queries of a block after some of their keys.
struct Running<T> {
    /// The highest score.
    top: [T; QUERIES],
    /// The sum of exponentials of scores less the highest.
    total: [T; QUERIES],
}

impl<T: Real> Running<T> {
    fn new() -> Self {
        Self { top: [T::NEG_INFINITY; QUERIES], total: [T::zero(); QUERIES] }
    }

    /// Divides what is mixed by the sums, and gives their logarithms.
    fn finish(&self, mixed: &mut [T], log_sums: &mut [T]) {
        let width = mixed.len() / log_sums.len().max(1);
        let rows = mixed.chunks_exact_mut(width.max(1)).zip(log_sums);
        for ((mixed, log_sum), (&top, &total)) in rows.zip(self.top.iter().zip(&self.total)) {
            if total == T::zero() {
                *log_sum = T::NEG_INFINITY;
                continue;
            }
            let share = T::one() / total;
            mixed.iter_mut().for_each(|x| *x *= share);
            *log_sum = top + ln(total);
        }
    }
}

impl CustomOp3 for Fused {
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
        let mixed = match q {
            CpuStorage::F32(_) => self.mixed::<f32>(parts)?,
            CpuStorage::F64(_) => self.mixed::<f64>(parts)?,
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((mixed, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mixed: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let [of_q, of_k, of_v] = match q.dtype() {
            DType::F32 => self.gradients::<f32>([q, k, v, mixed, &gradient])?,
            _ => self.gradients::<f64>([q, k, v, mixed, &gradient])?,
        };
        Ok((of_q, of_k, of_v))
    }
}
