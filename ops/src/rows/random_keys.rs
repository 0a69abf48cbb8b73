//! Random keys for the rows of a batch.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};
use sampler::split_mix;

use super::RowContext;

/// A random key for each row of a batch, derived from the run's seed, the step, and the row's index in the global
/// batch over all ranks. Layers that derive their random numbers from them
/// ([`Dropout::by_row`](crate::Dropout::by_row)) draw the same ones in every layout and in a resumed run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowKeys(Arc<[u64]>);

impl RowKeys {
    /// The keys of the rows with these indices in the global batch.
    pub fn new(seed: u64, step: u64, rows: impl IntoIterator<Item = usize>) -> Self {
        let of_step = split_mix(split_mix(seed, 1), step);
        Self(rows.into_iter().map(|row| split_mix(of_step, row as u64)).collect())
    }

    /// The keys of a range of the rows.
    ///
    /// # Panics
    /// If the range exceeds the rows.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        Self(self.0[rows].into())
    }

    /// Runs a forward pass of these rows, on this thread. Recomputation in backward uses the same keys.
    pub fn scope<T>(&self, forward: impl FnOnce() -> T) -> T {
        RowContext { keys: Some(self.clone()), ..RowContext::current() }.scope(forward)
    }

    /// The keys of this thread's innermost [`scope`](Self::scope), or `None` outside of one.
    pub fn current() -> Option<Self> {
        RowContext::current().keys
    }

    /// Derives a layer's keys. `rows` must be the number of rows.
    pub(crate) fn layer_keys(&self, layer: u64, rows: usize) -> Result<Vec<u64>> {
        if self.0.len() != rows {
            bail!("dropout of {rows} rows within RowKeys of {}: give as many", self.0.len())
        }
        Ok(self.0.iter().map(|key| split_mix(*key, layer)).collect())
    }
}
