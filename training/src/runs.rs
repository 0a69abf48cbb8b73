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

    /// The shard's elements, out of all.
    pub fn take<T: Copy>(self, all: &[T]) -> Vec<T> {
        self.ranges().flat_map(|range| &all[range]).copied().collect()
    }
}
