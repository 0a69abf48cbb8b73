//! Pairwise all-reduce: each rank reduces its part of the buffer as in [`super::pairwise_reduce_scatter`], then sends
//! the result to all others. It sends as many bytes as the ring, but in the elements' own dtype, and reduces in a wider
//! one.

use super::pairwise_reduce_scatter::{exchange, others, sum};
use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer, part};

/// Works on the buffer, one segment of at most `segment` elements after the other, and scratch space behind it, see
/// [`room`].
///
/// # Cost
/// 2 steps a segment; each rank sends 2(P-1)/P of the buffer, the same amount to every other rank.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005: all-reduce as a
/// reduce-scatter (by pairwise exchange) and an all-gather.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize, segment: usize) -> Schedule {
    let count = segments(len, segment);
    let steps = (0..count).flat_map(|index| {
        let place = part(len, count, index);
        let parts = Parts::even(place.len(), world_size);
        let of = |rank| {
            let part = parts.of(rank);
            place.start + part.start..place.start + part.end
        };
        let mut last = vec![sum(rank, world_size, of(rank).start, len, of(rank))];
        for peer in others(rank, world_size) {
            last.push(Transfer::Send { to: peer, range: of(rank) });
            last.push(Transfer::Recv { from: peer, range: of(peer), combine: Combine::Replace });
        }
        [exchange(rank, &parts, place.start, len), ScheduleStep { transfers: last, finished: 0..0 }]
    });
    Schedule { steps: steps.collect() }
}

/// Returns the number of elements of the buffer beyond the `len` to reduce.
pub(crate) fn room(world_size: usize, len: usize, segment: usize) -> usize {
    (world_size - 1) * len.div_ceil(segments(len, segment)).div_ceil(world_size)
}

/// Returns the number of segments of the buffer, at least 1.
pub(super) fn segments(len: usize, segment: usize) -> usize {
    len.div_ceil(segment.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn all_end_with_the_sum_in_the_order_of_ranks() {
        for world_size in 1..=9 {
            for (len, segment) in [(0, 1), (1, 100), (world_size - 1, 100), (50, 100), (50, 7), (51, 0)] {
                let all = schedules(world_size, |rank| schedule(rank, world_size, len, segment));
                for buffer in run(&all, len + room(world_size, len, segment)) {
                    for (index, element) in buffer[..len].iter().enumerate() {
                        let expected: Vec<usize> = (0..world_size).collect();
                        assert_eq!(element.order(), expected, "element {index} of {len}");
                    }
                }
            }
        }
    }

    #[test]
    fn cost() {
        let schedule = schedule(1, 4, 1000, 500);
        assert_eq!((schedule.steps.len(), schedule.elements_sent()), (2 * 2, 2 * 3 * 1000 / 4));
        assert_eq!((room(4, 1000, 500), room(4, 1000, usize::MAX)), (3 * 125, 3 * 250));
    }
}
