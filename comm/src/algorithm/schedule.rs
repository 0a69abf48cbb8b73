//! Schedules: which elements a rank sends to and receives from which ranks, in which step.
//!
//! A schedule is the part of one rank; those of all ranks match. They are computed by the pure functions of
//! [`crate::algorithm`], and run by one executor over any transport.

use std::collections::BTreeSet;
use std::ops::Range;

/// What to do with received elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// Overwrite this rank's elements.
    Replace,
    /// Reduce with this rank's elements, the received ones being the left operand.
    TheirsFirst,
    /// Reduce with this rank's elements, the received ones being the right operand.
    MineFirst,
}

/// One transfer of a step. Ranges count elements of the buffer that the schedule works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transfer {
    /// Sends the elements of `range`, as they were at the beginning of the step.
    Send {
        /// The receiver.
        to: usize,
        /// Which elements.
        range: Range<usize>,
    },
    /// Receives into `range`.
    Recv {
        /// The sender.
        from: usize,
        /// Which elements.
        range: Range<usize>,
        /// What to do with them.
        combine: Combine,
    },
    /// Receives elements, reduces them with other elements of the buffer, which are not changed, and writes the result
    /// to `range`.
    Fold {
        /// The sender.
        from: usize,
        /// The elements to write to.
        range: Range<usize>,
        /// Index of the first of this rank's elements to reduce with.
        mine: usize,
        /// The order of the operands.
        combine: Combine,
    },
    /// Copies elements within the buffer, before anything else in the step.
    Copy {
        /// Which elements.
        range: Range<usize>,
        /// Index to which the first of them is copied.
        to: usize,
    },
    /// Reduces several ranges of f16 or bf16 elements of the buffer in f32; an average is divided, then the result is
    /// rounded once. Like a copy, this is done before anything else in the step.
    Reduce {
        /// Index of the first element of each range, in the order of the operands.
        places: Vec<usize>,
        /// The elements to write to, which may be one of the operand ranges.
        range: Range<usize>,
    },
}

impl Transfer {
    /// Returns the peer, and whether this rank sends to it. `None` for a local transfer.
    pub(crate) fn peer(&self) -> Option<(usize, bool)> {
        match self {
            Transfer::Send { to, .. } => Some((*to, true)),
            Transfer::Recv { from, .. } | Transfer::Fold { from, .. } => Some((*from, false)),
            Transfer::Copy { .. } | Transfer::Reduce { .. } => None,
        }
    }

    fn shift(&mut self, by: usize) {
        let shift = |range: &mut Range<usize>| *range = range.start + by..range.end + by;
        match self {
            Transfer::Send { range, .. } | Transfer::Recv { range, .. } => shift(range),
            Transfer::Fold { range, mine, .. } => {
                shift(range);
                *mine += by;
            }
            Transfer::Copy { range, to } => {
                shift(range);
                *to += by;
            }
            Transfer::Reduce { places, range } => {
                places.iter_mut().for_each(|place| *place += by);
                shift(range);
            }
        }
    }
}

/// Transfers that run at the same time: at most one to, and one from, each peer. Received ranges do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ScheduleStep {
    /// In any order.
    pub transfers: Vec<Transfer>,
    /// Elements whose reduction is complete after this step; an average is divided then.
    pub finished: Range<usize>,
}

impl ScheduleStep {
    /// Whether this rank and a peer exchange the same elements and both reduce them.
    pub(crate) fn is_exchange(&self) -> bool {
        let sends = |peer: usize, elements: &Range<usize>| {
            let matches = |transfer: &Transfer| matches!(transfer, Transfer::Send { to, range } if *to == peer && range == elements);
            self.transfers.iter().any(matches)
        };
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::Recv { from, range, combine } => *combine != Combine::Replace && sends(*from, range),
            _ => false,
        })
    }
}

/// The transfers of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Schedule {
    /// In the order in which they run.
    pub steps: Vec<ScheduleStep>,
}

impl Schedule {
    /// Returns a schedule of one local step that copies `range` to index `to`.
    pub(crate) fn copying(range: Range<usize>, to: usize) -> Self {
        let transfers = if range.is_empty() { Vec::new() } else { vec![Transfer::Copy { range, to }] };
        Self { steps: vec![ScheduleStep { transfers, finished: 0..0 }] }
    }

    /// Returns this schedule followed by the other one, on the same buffer.
    pub(crate) fn then(mut self, other: Schedule) -> Self {
        self.steps.extend(other.steps);
        self
    }

    /// Merges two schedules, so that their n-th steps run at the same time. They must neither use the same elements nor
    /// exchange data with the same ranks.
    pub(crate) fn beside(self, other: Schedule) -> Self {
        let (mut one, mut other) = (self.steps.into_iter(), other.steps.into_iter());
        let merged = std::iter::from_fn(|| match (one.next(), other.next()) {
            (Some(mut step), Some(beside)) => {
                step.transfers.extend(beside.transfers);
                step.finished = if step.finished.is_empty() { beside.finished } else { step.finished };
                Some(step)
            }
            (one, other) => one.or(other),
        });
        Self { steps: merged.collect() }
    }

    /// Returns the schedule with each rank replaced by `rank_at` of it.
    pub(crate) fn among(mut self, rank_at: impl Fn(usize) -> usize) -> Self {
        for transfer in self.steps.iter_mut().flat_map(|step| &mut step.transfers) {
            match transfer {
                Transfer::Send { to, .. } => *to = rank_at(*to),
                Transfer::Recv { from, .. } | Transfer::Fold { from, .. } => *from = rank_at(*from),
                Transfer::Copy { .. } | Transfer::Reduce { .. } => {}
            }
        }
        self
    }

    /// Returns the schedule with all indices increased by `by`.
    pub(crate) fn shifted(mut self, by: usize) -> Self {
        for step in &mut self.steps {
            step.transfers.iter_mut().for_each(|transfer| transfer.shift(by));
            step.finished = step.finished.start + by..step.finished.end + by;
        }
        self
    }

    /// Returns the ranks it exchanges data with, each once, in order.
    pub(crate) fn peers(&self) -> Vec<usize> {
        let peers: BTreeSet<usize> =
            self.transfers().filter_map(Transfer::peer).map(|(peer, _)| peer).collect();
        peers.into_iter().collect()
    }

    /// Returns the number of elements that this rank sends in all.
    #[cfg(test)]
    pub(crate) fn elements_sent(&self) -> usize {
        self.transfers()
            .map(|transfer| if let Transfer::Send { range, .. } = transfer { range.len() } else { 0 })
            .sum()
    }

    fn transfers(&self) -> impl Iterator<Item = &Transfer> {
        self.steps.iter().flat_map(|step| &step.transfers)
    }
}

impl ScheduleStep {
    /// Returns whether an element of `received` is also sent in this step. It must then be sent with its old value.
    pub(crate) fn overlaps(&self, received: &Range<usize>) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::Send { range, .. } => range.start < received.end && received.start < range.end,
            _ => false,
        })
    }
}

/// Returns the `part`-th of `parts` nearly equal parts of `len` elements; `part` is taken modulo `parts`.
pub(crate) fn part(len: usize, parts: usize, part: usize) -> Range<usize> {
    let at = |index: usize| match len.checked_mul(index) {
        Some(product) => product / parts,
        None => (len as u128 * index as u128 / parts as u128) as usize,
    };
    let part = part % parts;
    at(part)..at(part + 1)
}

/// Returns the `index`-th of `pieces` nearly equal pieces of a range.
pub(crate) fn piece(range: &Range<usize>, pieces: usize, index: usize) -> Range<usize> {
    let within = part(range.len(), pieces, index);
    range.start + within.start..range.start + within.end
}

/// Division of a buffer among ranks, into consecutive parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts(Bounds);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Bounds {
    Even {
        len: usize,
        count: usize,
    },
    /// The index at which each part begins, and the end of the last one.
    Uneven(Vec<usize>),
}

impl Parts {
    /// Divides `len` elements into `count` nearly equal parts.
    pub fn even(len: usize, count: usize) -> Self {
        Self(Bounds::Even { len, count })
    }

    /// Makes a part for each of `counts`, of that length.
    pub(crate) fn uneven(counts: &[usize]) -> Self {
        let mut end = 0;
        let ends = counts.iter().map(|count| {
            end += count;
            end
        });
        Self(Bounds::Uneven(std::iter::once(0).chain(ends).collect()))
    }

    /// Returns the number of parts.
    pub(crate) fn count(&self) -> usize {
        match &self.0 {
            Bounds::Even { count, .. } => *count,
            Bounds::Uneven(bounds) => bounds.len() - 1,
        }
    }

    /// Returns the number of elements in all.
    pub(crate) fn len(&self) -> usize {
        match &self.0 {
            Bounds::Even { len, .. } => *len,
            Bounds::Uneven(bounds) => bounds.last().copied().unwrap_or(0),
        }
    }

    /// Returns the range of one part; `index` is taken modulo the number of parts.
    pub fn of(&self, index: usize) -> Range<usize> {
        match &self.0 {
            Bounds::Even { len, count } => part(*len, *count, index),
            Bounds::Uneven(bounds) => {
                let index = index % (bounds.len() - 1);
                bounds[index]..bounds[index + 1]
            }
        }
    }

    /// Returns the number of elements of the longest part.
    pub(crate) fn longest(&self) -> usize {
        match &self.0 {
            Bounds::Even { len, count } => len.div_ceil(*count),
            Bounds::Uneven(bounds) => bounds.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::ring_all_reduce;

    #[test]
    fn a_buffer_is_divided_into_nearly_equal_parts() {
        assert_eq!([part(10, 3, 0), part(10, 3, 1), part(10, 3, 5)], [0..3, 3..6, 6..10]);
        assert_eq!([piece(&(10..20), 3, 0), piece(&(10..20), 3, 2)], [10..13, 16..20]);
        let parts = Parts::uneven(&[2, 0, 3]);
        assert_eq!((parts.of(0), parts.of(1), parts.of(2), parts.len()), (0..2, 2..2, 2..5, 5));
        assert_eq!((parts.longest(), Parts::even(10, 3).longest()), (3, 4));
    }

    #[test]
    fn a_ring_sends_twice_the_buffer_less_two_parts() {
        assert_eq!(ring_all_reduce::schedule(0, 4, 1000).elements_sent(), 2 * 3 * 1000 / 4);
    }
}
