//! Fused attention: loops over heads and blocks, forward and backward.

use std::ops::Range;

use rayon::prelude::*;

use crate::blocks::has_one_thread;
use crate::product::{Accumulator, Matrix, multiply};
use crate::real::{Real, sum_pairs};
use crate::simd::vectorized;

use super::super::{AttentionCall, Sizes};
use super::Inputs;
use super::block::{Block, OnlineSoftmax, QUERIES};

const KEYS: usize = 512;

/// Queries for which a transposed copy of the keys costs more than it saves.
const FEW: usize = 4;

/// Work below this many multiplications runs on the calling thread.
const SMALL: usize = 1 << 18;

/// `seen` relative to the start of `near`.
fn relative_to(seen: &Range<usize>, near: &Range<usize>) -> Range<usize> {
    seen.start - near.start..seen.end - near.start
}

impl Sizes {
    /// One head's rows of a tensor with `len` positions and `heads` heads.
    fn head<T>(self, numbers: &[T], index: usize, len: usize, heads: usize) -> Matrix<'_, T> {
        let start = index / heads * len * heads * self.dims + index % heads * self.dims;
        Matrix::new(numbers.get(start..).unwrap_or_default(), len, self.dims, heads * self.dims)
    }

    /// Converts from (batch, head, position, dims) to (batch, position, head, dims).
    fn interleave_heads<T: Real>(self, apart: Vec<T>, len: usize, heads: usize) -> Vec<T> {
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

    /// Maximum number of scores in a block.
    fn scores(self) -> usize {
        self.queries.min(QUERIES) * self.keys.min(KEYS)
    }

    /// Whether the queries are too few for blocks of products to pay: a step of generation, whose keys are cached.
    fn has_few_queries(self) -> bool {
        self.queries <= FEW && self.queries < self.keys
    }

    /// Whether other threads would not help.
    fn is_for_one_thread(self) -> bool {
        let products = [self.batch, self.heads, self.queries, self.keys, self.dims];
        products.into_iter().fold(1, usize::saturating_mul) < SMALL || has_one_thread()
    }
}

impl AttentionCall {
    /// Returns the output, and the logarithm of each query's sum of exponentials, head by head.
    pub(in super::super) fn forward<T: Accumulator>(
        &self,
        inputs: Inputs<'_, T, 3>,
    ) -> candle_core::Result<(Vec<T>, Vec<T>)> {
        let sizes @ Sizes { batch, queries, heads, dims, .. } = self.sizes;
        let mut mixed = vec![T::zero(); batch * heads * queries * dims];
        let mut log_sums = vec![T::zero(); batch * heads * queries];
        let (each, few) = ((queries * dims).max(1), queries.max(1));
        let one = |scratch: &mut [Vec<T>; 2], (index, (out, sums)): (usize, (&mut [T], &mut [T]))| {
            if sizes.has_few_queries() {
                self.forward_few(index, inputs, out, sums, &mut scratch[0]);
                return Ok(());
            }
            self.forward_head(index, inputs, out, sums, scratch)
        };
        if sizes.is_for_one_thread() {
            let mut scratch = Default::default();
            let mut heads = mixed.chunks_mut(each).zip(log_sums.chunks_mut(few)).enumerate();
            heads.try_for_each(|head| one(&mut scratch, head))?;
        } else {
            let heads = mixed.par_chunks_mut(each).zip(log_sums.par_chunks_mut(few)).enumerate();
            heads.try_for_each_init(Default::default, one)?;
        }
        Ok((sizes.interleave_heads(mixed, queries, heads), log_sums))
    }

    /// Forward of one head with so few queries that a transposed copy of the keys would not pay: dot products with the
    /// keys that are seen, one pass over them and their values.
    fn forward_few<T: Accumulator>(
        &self,
        index: usize,
        [q, k, v]: Inputs<'_, T, 3>,
        out: &mut [T],
        log_sums: &mut [T],
        scores: &mut Vec<T>,
    ) {
        let sizes @ Sizes { queries, keys, heads, kv_heads, dims, .. } = self.sizes;
        let shared = index / (heads / kv_heads);
        let q = sizes.head(q, index, queries, heads);
        let (k, v) = (sizes.head(k, shared, keys, kv_heads), sizes.head(v, shared, keys, kv_heads));
        let (scale, mut running) = (T::from_f64(self.scale), OnlineSoftmax::new());
        for near in self.key_ranges() {
            let Some(block) = self.block(index, &(0..queries), &near) else { continue };
            let seen = block.seen.clone();
            scores.resize(queries * seen.len(), T::zero());
            vectorized!({
                for (row, scores) in scores.chunks_exact_mut(seen.len()).enumerate() {
                    for (score, key) in scores.iter_mut().zip(seen.clone()) {
                        *score = scale * sum_pairs(q.row(row), k.row(key), |x, y| x * y);
                    }
                }
                self.softmax_block(scores, &block, &mut running, out);
                for (out, weights) in out.chunks_exact_mut(dims).zip(scores.chunks_exact(seen.len())) {
                    for (&weight, key) in weights.iter().zip(seen.clone()) {
                        out.iter_mut().zip(v.row(key)).for_each(|(out, &x)| *out += weight * x);
                    }
                }
            });
        }
        running.finish(out, log_sums);
    }

    fn forward_head<T: Accumulator>(
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
        let mut running: Vec<OnlineSoftmax<T>> =
            log_sums.chunks(QUERIES).map(|_| OnlineSoftmax::new()).collect();
        for near in self.key_ranges() {
            k.rows(near.clone()).transpose_into(k_by_dims);
            let k_by_dims = Matrix::new(&*k_by_dims, dims, near.len(), near.len());
            let blocks = out.chunks_mut(QUERIES * dims).zip(&mut running);
            for (at, (out, running)) in blocks.enumerate() {
                let rows = at * QUERIES..at * QUERIES + out.len() / dims;
                let Some(block) = self.block(index, &rows, &near) else { continue };
                let seen = block.seen.clone();
                let scores = &mut scores[..rows.len() * seen.len()];
                let pair = (q.rows(rows.clone()), k_by_dims.columns(relative_to(&seen, &near)));
                multiply(scores, pair, T::from_f64(self.scale), false, self.how)?;
                vectorized!({ self.softmax_block(scores, &block, running, out) });
                let weights = Matrix::new(&*scores, rows.len(), seen.len(), seen.len());
                multiply(out, (weights, v.rows(seen)), T::one(), true, self.how)?;
            }
        }
        let blocks = out.chunks_mut(QUERIES * dims).zip(log_sums.chunks_mut(QUERIES));
        blocks.zip(&running).for_each(|((out, log_sums), running)| running.finish(out, log_sums));
        Ok(())
    }

    /// Returns the gradients of queries, keys and values.
    pub(in super::super) fn backward<T: Accumulator>(
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
        if sizes.is_for_one_thread() {
            let mut scratch = Default::default();
            let parts = of_q.chunks_mut(group).zip(of_k.chunks_mut(each)).zip(of_v.chunks_mut(each));
            parts.enumerate().try_for_each(|part| one(&mut scratch, part))?;
        } else {
            let parts = of_q.par_chunks_mut(group).zip(of_k.par_chunks_mut(each));
            let parts = parts.zip(of_v.par_chunks_mut(each)).enumerate();
            parts.try_for_each_init(Default::default, one)?;
        }
        Ok([
            sizes.interleave_heads(of_q, queries, heads),
            sizes.interleave_heads(of_k, keys, kv_heads),
            sizes.interleave_heads(of_v, keys, kv_heads),
        ])
    }

    /// Backward of one head of keys and values, with the query heads that share it.
    fn backward_group<T: Accumulator>(
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
        let (scale, one) = (T::from_f64(self.scale), T::one());
        for near in self.key_ranges() {
            k.rows(near.clone()).transpose_into(k_by_dims);
            v.rows(near.clone()).transpose_into(v_by_dims);
            let by_dims = [&*k_by_dims, &*v_by_dims].map(|x| Matrix::new(x, dims, near.len(), near.len()));
            for (member, of_q) in of_q.chunks_mut(queries * dims).enumerate() {
                let index = group * (heads / kv_heads) + member;
                let of_head = [q, mixed, gradient].map(|x| sizes.head(x, index, queries, heads));
                for (at, of_q) in of_q.chunks_mut(QUERIES * dims).enumerate() {
                    let rows = at * QUERIES..at * QUERIES + of_q.len() / dims;
                    let Some(block) = self.block(index, &rows, &near) else { continue };
                    let [q, mixed, gradient] = of_head.map(|x| x.rows(rows.clone()));
                    let log_sums = &log_sums[index * queries + rows.start..index * queries + rows.end];
                    let (m, n, seen) = (rows.len(), block.seen.len(), block.seen.clone());
                    let [k_by_dims, v_by_dims] = by_dims.map(|x| x.columns(relative_to(&seen, &near)));
                    let (weights, of_scores) = (&mut weights[..m * n], &mut of_scores[..m * n]);
                    multiply(weights, (q, k_by_dims), scale, false, self.how)?;
                    multiply(of_scores, (gradient, v_by_dims), one, false, self.how)?;
                    vectorized!({
                        self.backward_block(weights, of_scores, &block, log_sums, [mixed, gradient])
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

    /// Ranges of keys small enough that they, their values and the gradients of both stay in a core's cache while all
    /// queries that see them are processed.
    fn key_ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let keys = self.sizes.keys;
        (0..keys).step_by(KEYS).map(move |start| start..keys.min(start + KEYS))
    }

    /// The block of a head's queries `rows` and those of the keys `near` that any of them sees; `None` if there are
    /// none.
    fn block(&self, index: usize, rows: &Range<usize>, near: &Range<usize>) -> Option<Block> {
        let seen = self.union(index / self.sizes.heads, rows.clone());
        let seen = seen.start.max(near.start)..seen.end.min(near.end);
        (!seen.is_empty()).then_some(Block { index, first: rows.start, seen })
    }
}
