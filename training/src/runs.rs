//! Equally spaced element ranges of a flattened tensor.

use std::ops::Range;

/// Positions of a shard's elements in the flattened whole weight: equal runs at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// Index of the first element.
    pub start: usize,
    /// Number of elements in a run.
    pub len: usize,
    /// Distance from the beginning of a run to that of the next.
    pub stride: usize,
    /// Number of runs.
    pub count: usize,
}

impl Runs {
    /// Returns each run's range of indices in the whole.
    pub fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count).map(move |run| {
            let start = self.start + run * self.stride;
            start..start + self.len
        })
    }

    /// Returns the elements in `window`, an index range of the concatenated runs, as ranges of indices in the whole,
    /// in order. Runs without such elements are omitted.
    ///
    /// ```
    /// use training::internal::Runs;
    ///
    /// let runs = Runs { start: 2, len: 3, stride: 10, count: 4 };
    /// assert_eq!(runs.within(2..7).collect::<Vec<_>>(), [4..5, 12..15, 22..23]);
    /// ```
    pub fn within(self, window: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let len = self.len.max(1);
        let first = window.start / len;
        let last = window.end.div_ceil(len).min(self.count);
        (first..last.max(first)).filter_map(move |run| {
            let base = run * self.len;
            let from = window.start.max(base);
            let to = window.end.min(base + self.len);
            let start = self.start + run * self.stride;
            (from < to).then(|| start + from - base..start + to - base)
        })
    }

    /// Extracts the shard's elements from the whole.
    pub fn take<T: Copy>(self, all: &[T]) -> Vec<T> {
        self.ranges().flat_map(|range| &all[range]).copied().collect()
    }
}
