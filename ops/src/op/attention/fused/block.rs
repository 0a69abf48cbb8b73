//! Attention scores of one block of queries and keys: masking, softmax and dropout.

use std::ops::Range;

use crate::product::Matrix;
use crate::real::{Real, ln, max, sum, sum_pairs};

use super::super::{AttentionCall, Sizes};

/// Queries in a block: its scores, and those of backward, fit a core's caches.
pub(super) const QUERIES: usize = 64;

/// Extent of a block of scores.
pub(super) struct Block {
    /// The head's index, counted over the batch.
    pub(super) index: usize,
    /// First query.
    pub(super) first: usize,
    /// Range of keys.
    pub(super) seen: Range<usize>,
}

/// Online softmax state of a block's queries after some of their keys.
pub(super) struct OnlineSoftmax<T> {
    /// Highest score so far.
    top: [T; QUERIES],
    /// Sum of `exp(score - top)` so far.
    total: [T; QUERIES],
}

impl<T: Real> OnlineSoftmax<T> {
    pub(super) fn new() -> Self {
        Self { top: [T::NEG_INFINITY; QUERIES], total: [T::zero(); QUERIES] }
    }

    /// Divides the output by the sums, and writes the logarithms of the sums.
    pub(super) fn finish(&self, mixed: &mut [T], log_sums: &mut [T]) {
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

impl AttentionCall {
    /// Turns a block's scores into exponentials relative to the running maximum, and rescales the output so far to
    /// that maximum.
    #[inline(always)]
    pub(super) fn softmax_block<T: Real>(
        &self,
        scores: &mut [T],
        block: &Block,
        running: &mut OnlineSoftmax<T>,
        mixed: &mut [T],
    ) {
        let rows = scores.chunks_exact_mut(block.seen.len()).zip(mixed.chunks_exact_mut(self.sizes.dims));
        let states = running.top.iter_mut().zip(&mut running.total);
        for (at, ((row, mixed), (top, total))) in rows.zip(states).enumerate() {
            match self.seen_in_block(block, at) {
                // Other parts have keys for it.
                None if self.part.is_some() => row.fill(T::zero()),
                None => {
                    row.fill(self.weight_without_keys());
                    (*top, *total) = (T::zero(), T::one());
                }
                Some(own) => {
                    self.hide(row, block, own.clone());
                    let seen = &mut row[own];
                    let highest = max(seen);
                    let highest = if highest > *top { highest } else { *top };
                    // A NaN score is not hidden, and must show in the result.
                    let all_hidden = || self.hidden.is_some() && seen.iter().all(|x| *x == T::NEG_INFINITY);
                    if highest == T::NEG_INFINITY && (seen.is_empty() || all_hidden()) {
                        seen.fill(T::zero());
                        continue;
                    }
                    if highest > *top {
                        let factor = (*top - highest).exp_nonpositive();
                        mixed.iter_mut().for_each(|x| *x *= factor);
                        (*top, *total) = (highest, *total * factor);
                    }
                    seen.iter_mut().for_each(|x| *x = (*x - highest).exp_nonpositive());
                    *total += sum(seen, |x| x);
                }
            }
            self.apply_dropout(row, block, at);
        }
    }

    /// Recomputes a block's weights from its scores, and turns gradients of weights into gradients of scores, without
    /// the scale.
    #[inline(always)]
    pub(super) fn backward_block<T: Real>(
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
            let own = match self.seen_in_block(block, at) {
                None => {
                    row.fill(self.weight_without_keys());
                    0..0
                }
                Some(own) => {
                    self.hide(row, block, own.clone());
                    let seen = &mut row[own.clone()];
                    if log_sum == T::NEG_INFINITY && self.hidden.is_some() {
                        seen.fill(T::zero());
                    } else {
                        seen.iter_mut().for_each(|x| *x = (*x - log_sum).exp_nonpositive());
                    }
                    own
                }
            };
            self.apply_dropout(of_row, block, at);
            let mean = sum_pairs(mixed.row(at), gradient.row(at), |o, g| o * g);
            of_row[..own.start].fill(T::zero());
            of_row[own.end..].fill(T::zero());
            of_row[own.clone()].iter_mut().zip(&row[own]).for_each(|(s, &w)| *s = w * (*s - mean));
            self.apply_dropout(row, block, at);
        }
    }

    /// Weight of each key for a query whose mask has no key.
    fn weight_without_keys<T: Real>(&self) -> T {
        if self.hidden.is_some() || self.part.is_some() {
            T::zero()
        } else {
            T::from_f64(1.0 / self.sizes.keys as f64)
        }
    }

    /// Which of the block's keys the query in row `at` sees; `None` if its mask has no key at all.
    #[inline(always)]
    fn seen_in_block(&self, block: &Block, at: usize) -> Option<Range<usize>> {
        let own = self.range(block.index / self.sizes.heads, block.first + at);
        let within = |key: usize| key.clamp(block.seen.start, block.seen.end) - block.seen.start;
        (!own.is_empty()).then(|| within(own.start)..within(own.end))
    }

    /// Zeroes the scores outside `seen_in_block`, and sets those of hidden keys inside it to negative infinity.
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
    fn apply_dropout<T: Real>(&self, row: &mut [T], block: &Block, at: usize) {
        if let Some(mask) = &self.dropout {
            let Sizes { heads, queries, keys, .. } = self.sizes;
            let seen = row.iter_mut().zip(block.seen.start..);
            if let Some(part) = &self.part {
                let line = block.index * part.len() + part.query(block.first + at);
                let line = mask.line(line, heads * part.len(), part.len());
                return seen.for_each(|(x, key)| *x *= T::from_f64(line.factor(part.key(key))));
            }
            let line = mask.line(block.index * queries + block.first + at, heads * queries, keys);
            seen.for_each(|(x, key)| *x *= T::from_f64(line.factor(key)));
        }
    }
}
