//! Regions: which elements of a tensor a rank holds. Index arithmetic only.

use std::ops::Range;

use training::internal::Runs;

/// Some elements of a flattened tensor: the elements of `runs`, concatenated, of which `window` selects a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Shape of the whole tensor.
    pub dims: Vec<usize>,
    /// The elements that a tensor-parallel rank has.
    pub runs: Runs,
    /// Range of indices into the elements of `runs`.
    pub window: Range<usize>,
}

/// A range of elements that two regions have in common: its start in each region, and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) first: usize,
    pub(crate) second: usize,
    pub(crate) len: usize,
}

impl Region {
    /// Returns the region of all elements of a tensor of this shape.
    pub fn whole(dims: &[usize]) -> Self {
        let len = dims.iter().product();
        let runs = Runs { start: 0, len, stride: len, count: 1 };
        Self { dims: dims.to_vec(), runs, window: 0..len }
    }

    /// Returns a range of this region's elements.
    pub(crate) fn within(&self, range: &Range<usize>) -> Self {
        let window = self.window.start + range.start..self.window.start + range.end;
        Self { window, ..self.clone() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.window.len()
    }

    /// Whether the region has no elements.
    pub fn is_empty(&self) -> bool {
        self.window.is_empty()
    }

    /// Returns the ranges of the flattened tensor, each with its offset in the region; both ascending.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.runs.within(self.window.clone()).scan(0, |end, range| {
            let begin = *end;
            *end += range.len();
            Some((range, begin))
        })
    }

    /// Returns the ranges of the flattened tensor, ascending.
    pub fn elements(&self) -> impl Iterator<Item = Range<usize>> {
        self.runs.within(self.window.clone())
    }

    /// Returns the elements that two regions of one tensor have in common, in order.
    pub(crate) fn common(&self, other: &Self) -> Vec<Overlap> {
        let (mut own, mut others) = (self.ranges().peekable(), other.ranges().peekable());
        let mut found = Vec::new();
        while let (Some((a, first)), Some((b, second))) = (own.peek(), others.peek()) {
            let (start, end) = (a.start.max(b.start), a.end.min(b.end));
            if start < end {
                let (first, second) = (first + start - a.start, second + start - b.start);
                found.push(Overlap { first, second, len: end - start });
            }
            // The range that ends first has nothing more in common with the other region.
            if a.end <= b.end {
                own.next()
            } else {
                others.next()
            };
        }
        found
    }

    /// Whether the region fits its tensor: nothing lies beyond the end, and the runs do not overlap.
    pub(crate) fn is_valid(&self) -> bool {
        let elements = self.dims.iter().try_fold(1usize, |all, dim| all.checked_mul(*dim));
        let Runs { start, len, stride, count } = self.runs;
        let end = count.checked_sub(1).and_then(|last| last.checked_mul(stride));
        let end = end.and_then(|last| last.checked_add(start)).and_then(|last| last.checked_add(len));
        let held = len.checked_mul(count);
        let fits = match (elements, end, held) {
            (Some(elements), Some(end), Some(held)) => end <= elements && self.window.end <= held,
            _ => false,
        };
        fits && self.window.start <= self.window.end && (count == 1 || stride >= len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A part of an array of 12 rows and 10 columns, divided along `tp`, and of that a part divided along `shard`.
    fn region() -> impl Strategy<Value = Region> {
        let runs = prop_oneof![
            Just(Runs { start: 0, len: 120, stride: 120, count: 1 }),
            (0..4usize).prop_map(|rank| Runs { start: rank * 30, len: 30, stride: 120, count: 1 }),
            (0..5usize).prop_map(|rank| Runs { start: rank * 2, len: 2, stride: 10, count: 12 }),
            (0..2usize).prop_map(|rank| Runs { start: rank * 20, len: 20, stride: 40, count: 3 }),
        ];
        (runs, 0..4usize, 1..4usize).prop_map(|(runs, rank, ranks)| {
            let held = runs.len * runs.count;
            let each = held.div_ceil(ranks);
            let window = (rank % ranks * each).min(held)..((rank % ranks + 1) * each).min(held);
            Region { dims: vec![12, 10], runs, window }
        })
    }

    fn places(region: &Region) -> Vec<usize> {
        let all: Vec<usize> = region.runs.ranges().flatten().collect();
        all[region.window.clone()].to_vec()
    }

    proptest! {
        #[test]
        fn common_elements_are_those_of_both(a in region(), b in region()) {
            let (own, others) = (places(&a), places(&b));
            let mut found = vec![None; own.len()];
            for Overlap { first, second, len } in a.common(&b) {
                for place in 0..len {
                    prop_assert_eq!(own[first + place], others[second + place]);
                    prop_assert!(found[first + place].replace(second + place).is_none());
                }
            }
            let expected: Vec<_> = own.iter().map(|place| others.iter().position(|other| other == place)).collect();
            prop_assert_eq!(found, expected);
            prop_assert!(a.is_valid());
        }

        #[test]
        fn regions_beyond_the_end_are_not_valid(more in 1..usize::MAX, field in 0..5usize) {
            let mut region = Region::whole(&[12, 10]);
            match field {
                0 => region.runs.start = more,
                1 => region.runs.len = 120usize.saturating_add(more),
                2 => (region.runs.count, region.runs.stride) = (2, more),
                3 => region.runs.count = 1usize.saturating_add(more),
                _ => region.window.end = 120usize.saturating_add(more),
            }
            prop_assert!(!region.is_valid());
        }
    }
}
