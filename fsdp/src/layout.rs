//! Layout of a unit's flat buffer: where each parameter lies, and which part each rank keeps.
//!
//! Pure arithmetic, the same on every rank. The flat buffer is divided into *parts*: one for each large parameter, and one
//! for all small parameters together. Where parameters have different groups of replicas, such as experts and others, small
//! ones are together with those of their group, and the parts of a group follow one another. Every part is padded to a multiple of the number of ranks, so that each rank keeps an
//! equal *piece* of it. A rank's shard is the concatenation of its pieces. The range of each parameter within the shard is a
//! variable.

use std::ops::Range;

/// A unit's flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FlatLayout {
    pub(crate) parts: Vec<Part>,
    /// Elements of a rank's shard.
    pub(crate) shard_len: usize,
    pub(crate) ranks: usize,
}

/// A contiguous range of the buffer that is communicated in one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// Place of the group of ranks that have replicas of its parameters.
    pub(crate) group: usize,
    /// Parameters in it, with their offsets.
    pub(crate) slots: Vec<Slot>,
    /// Elements, without padding.
    pub(crate) len: usize,
    /// Elements in each rank's piece.
    pub(crate) piece: usize,
    /// Offset of the piece in the shard.
    pub(crate) offset: usize,
    /// Whether it contains the small parameters, which are copied out after a gather; a large one is used in place.
    pub(crate) is_packed: bool,
}

/// Range of a parameter in its part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Index of the parameter, in order of construction.
    pub(crate) param: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl FlatLayout {
    /// Computes the layout for parameters on `ranks` ranks: `params` are their lengths, each with the index of its
    /// group. Those of a group with fewer than `pack` elements share one part.
    pub(crate) fn new(params: &[(usize, usize)], pack: usize, ranks: usize) -> Self {
        let mut layout = Self { parts: Vec::new(), shard_len: 0, ranks };
        let groups = params.iter().map(|(_, group)| group + 1).max().unwrap_or(0);
        for group in 0..groups {
            let mut small = Vec::new();
            for (param, &(len, _)) in params.iter().enumerate().filter(|(_, (_, of))| *of == group) {
                match len < pack || len == 0 {
                    true => small.push((param, len)),
                    false => layout.add(&[(param, len)], group, false),
                }
            }
            if !small.is_empty() {
                layout.add(&small, group, true);
            }
        }
        layout
    }

    fn add(&mut self, params: &[(usize, usize)], group: usize, is_packed: bool) {
        let mut slots = Vec::with_capacity(params.len());
        let mut start = 0;
        for &(param, len) in params {
            slots.push(Slot { param, start, len });
            start += len;
        }
        let piece = piece(start, self.ranks);
        self.parts.push(Part { group, slots, len: start, piece, offset: self.shard_len, is_packed });
        self.shard_len += piece;
    }

    /// Elements of all ranks' shards together, padding included.
    pub(crate) fn padded_len(&self) -> usize {
        self.shard_len * self.ranks
    }

    /// The range of a rank's shard that has the parameters of a group.
    pub(crate) fn of_group(&self, group: usize) -> Range<usize> {
        let own = || self.parts.iter().filter(|part| part.group == group);
        let start = own().map(|part| part.offset).next().unwrap_or(0);
        start..own().map(|part| part.offset + part.piece).next_back().unwrap_or(start)
    }

    /// Returns the part and slot of a parameter; `None` if there is no such parameter.
    pub(crate) fn find(&self, param: usize) -> Option<(&Part, &Slot)> {
        let slots = self.parts.iter().flat_map(|part| part.slots.iter().map(move |slot| (part, slot)));
        slots.into_iter().find(|(_, slot)| slot.param == param)
    }
}

impl Part {
    /// Returns the elements of this part that a rank keeps; the rest of its piece is padding.
    pub(crate) fn range(&self, rank: usize) -> Range<usize> {
        let start = (rank * self.piece).min(self.len);
        start..(start + self.piece).min(self.len)
    }

    /// Returns the elements of a parameter that a rank keeps, and their offset in the rank's piece of this part.
    pub(crate) fn kept(&self, slot: &Slot, rank: usize) -> (Range<usize>, usize) {
        let own = self.range(rank);
        let (start, end) = (own.start.max(slot.start), own.end.min(slot.start + slot.len));
        let range = if start < end { start - slot.start..end - slot.start } else { 0..0 };
        (range, start.min(own.end) - own.start)
    }

    /// Elements that a parameter takes in a rank's piece: those that the rank keeps and, for the part's last parameter, the
    /// padding.
    pub(crate) fn kept_len(&self, slot: &Slot, rank: usize) -> usize {
        let is_last = self.slots.last().is_some_and(|last| last.param == slot.param);
        let padding = if is_last { self.piece - self.range(rank).len() } else { 0 };
        self.kept(slot, rank).0.len() + padding
    }

    /// Elements of a rank's variable for a parameter: at least one, so that every rank has a variable for every parameter and
    /// no device is asked to allocate an empty tensor.
    pub(crate) fn variable_len(&self, slot: &Slot, rank: usize) -> usize {
        self.kept_len(slot, rank).max(1)
    }

    /// Returns how many elements each rank keeps; `None` where all keep the same number.
    pub(crate) fn counts(&self, ranks: usize) -> Option<Vec<usize>> {
        (self.piece * ranks != self.len).then(|| (0..ranks).map(|rank| self.range(rank).len()).collect())
    }
}

/// Elements of each rank's piece of a part of `len` elements.
pub(crate) fn piece(len: usize, ranks: usize) -> usize {
    len.div_ceil(ranks.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn large_parameters_are_parts_of_their_own() {
        let layout = FlatLayout::new(&[100, 3, 50, 4].map(|len| (len, 0)), 10, 3);
        let places: Vec<_> = layout.parts.iter().map(|part| (part.len, part.piece, part.offset)).collect();
        assert_eq!(places, [(100, 34, 0), (50, 17, 34), (7, 3, 51)]);
        assert_eq!((layout.shard_len, layout.padded_len()), (54, 162));
        assert_eq!(layout.parts[0].counts(3), Some(vec![34, 34, 32]));
        assert_eq!(layout.parts[1].counts(3), Some(vec![17, 17, 16]));
    }

    #[test]
    fn more_ranks_than_elements_leave_some_with_padding_only() {
        let layout = FlatLayout::new(&[(2, 0), (0, 0)], 10, 4);
        assert_eq!(layout.shard_len, 1);
        assert_eq!(layout.parts[0].counts(4), Some(vec![1, 1, 0, 0]));
    }

    proptest! {
        #[test]
        fn every_element_is_kept_once_and_padding_is_little(
            params in proptest::collection::vec((0usize..200, 0usize..3), 1..8),
            pack in 0usize..100,
            ranks in 1usize..9,
        ) {
            let layout = FlatLayout::new(&params, pack, ranks);
            let (lens, groups): (Vec<usize>, Vec<usize>) = params.into_iter().unzip();
            let mut seen = vec![false; lens.len()];
            for part in &layout.parts {
                let kept: Vec<usize> = (0..ranks).flat_map(|rank| part.range(rank)).collect();
                prop_assert_eq!(kept, (0..part.len).collect::<Vec<_>>());
                for slot in &part.slots {
                    prop_assert!(!std::mem::replace(&mut seen[slot.param], true));
                    prop_assert_eq!(slot.len, lens[slot.param]);
                    prop_assert_eq!(groups[slot.param], part.group);
                    let own = layout.of_group(part.group);
                    prop_assert!(own.start <= part.offset && part.offset + part.piece <= own.end);
                }
            }
            let of_groups: Vec<usize> = (0..3).flat_map(|group| layout.of_group(group)).collect();
            prop_assert_eq!(of_groups, (0..layout.shard_len).collect::<Vec<_>>());
            prop_assert!(seen.into_iter().all(|seen| seen));
            for (param, &len) in lens.iter().enumerate() {
                let (part, slot) = layout.find(param).expect("it has a place");
                let mut kept = vec![];
                for rank in 0..ranks {
                    let (own, start) = part.kept(slot, rank);
                    prop_assert!(start + part.kept_len(slot, rank) <= part.piece);
                    kept.extend(own);
                }
                prop_assert_eq!(kept, (0..len).collect::<Vec<_>>());
            }
            let elements: usize = lens.iter().sum();
            prop_assert!(layout.padded_len() < elements + ranks * layout.parts.len());
        }
    }
}
