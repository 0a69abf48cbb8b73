//! Parts of a tensor that is thought of as flat.

use std::ops::Range;

/// Where the elements of a shard lie among those of the whole weight: equal runs at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// The first element.
    pub start: usize,
    /// Elements of a run.
    pub len: usize,
    /// From the beginning of a run to that of the next.
    pub stride: usize,
    /// How many runs.
    pub count: usize,
}

impl Runs {
    /// Each run's elements, by their places in the whole.
    pub fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.count).map(move |run| {
            let start = self.start + run * self.stride;
            start..start + self.len
        })
    }

    /// Of the shard's elements, thought of as one after the other, those in `window`: by their places in the whole, in order. Runs that
    /// have none of them are left out.
    ///
    /// ```
    /// use training::Runs;
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

    /// The shard's elements, out of all.
    pub fn take<T: Copy>(self, all: &[T]) -> Vec<T> {
        self.ranges().flat_map(|range| &all[range]).copied().collect()
    }
}
