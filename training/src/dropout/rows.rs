//! A random key for each row of a batch.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use sampler::split_mix;

use crate::scoped::scoped;

thread_local! {
    static CURRENT: RefCell<Option<RowKeys>> = const { RefCell::new(None) };
}

/// A random key for each row of a batch, which depends on the run's seed, the step, and the row's place in the whole batch of all ranks. Layers
/// that make their random numbers from them ([`Dropout::by_row`](crate::Dropout::by_row)) have the same ones in every layout, and in a run that
/// goes on from a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowKeys(Arc<[u64]>);

impl RowKeys {
    /// The keys of these rows, by their places in the batch.
    pub fn new(seed: u64, step: u64, rows: impl IntoIterator<Item = usize>) -> Self {
        let of_step = split_mix(split_mix(seed, 1), step);
        Self(rows.into_iter().map(|row| split_mix(of_step, row as u64)).collect())
    }

    /// The keys of some of the rows.
    ///
    /// # Panics
    /// Where there are not as many.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        Self(self.0[rows].into())
    }

    /// Runs a forward pass of these rows, on this thread. What backward computes again has the keys of the first time.
    pub fn scope<T>(&self, forward: impl FnOnce() -> T) -> T {
        Self::scope_of(Some(self.clone()), forward)
    }

    pub(crate) fn scope_of<T>(keys: Option<Self>, forward: impl FnOnce() -> T) -> T {
        scoped(&CURRENT, keys, forward)
    }

    /// Those of the innermost [`scope`](Self::scope) of this thread.
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// A layer's keys.
    pub(super) fn of_layer(&self, layer: u64, rows: usize) -> Result<Vec<u64>> {
        if self.0.len() != rows {
            bail!("dropout of {rows} rows within RowKeys of {}: give as many", self.0.len())
        }
        Ok(self.0.iter().map(|key| split_mix(*key, layer)).collect())
    }
}
