//! Pairwise reduce: each rank reduces its part of the buffer as in [`super::pairwise_reduce_scatter`], and sends the
//! result to the root. The buffers of the other ranks are not changed.

use super::pairwise_all_reduce::segments;
use super::pairwise_reduce_scatter::{exchange, others, sum};
use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer, part};

/// Works on the buffer, one segment of at most `segment` elements after the other, and scratch space behind it, see
/// [`room`].
///
/// # Cost
/// 2 steps a segment; the root sends (P-1)/P of the buffer, each other rank all of it.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005: reduce as a
/// reduce-scatter (by pairwise exchange) and a gather.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize, root: usize, segment: usize) -> Schedule {
    let count = segments(len, segment);
    let steps = (0..count).flat_map(|index| {
        let place = part(len, count, index);
        let parts = Parts::even(place.len(), world_size);
        let of = |rank| {
            let part = parts.of(rank);
            place.start + part.start..place.start + part.end
        };
        let own = of(rank);
        let room = len + own.len();
        let target = if rank == root { own.clone() } else { len..room };
        let mut last = vec![sum(rank, world_size, own.start, room, target.clone())];
        if rank == root {
            let recv = |peer| Transfer::Recv { from: peer, range: of(peer), combine: Combine::Replace };
            last.extend(others(rank, world_size).map(recv));
        } else {
            last.push(Transfer::Send { to: root, range: target });
        }
        [exchange(rank, &parts, place.start, room), ScheduleStep { transfers: last, finished: 0..0 }]
    });
    Schedule { steps: steps.collect() }
}

/// Returns the number of elements of the buffer beyond the `len` to reduce.
pub(crate) fn room(world_size: usize, len: usize, segment: usize) -> usize {
    world_size * len.div_ceil(segments(len, segment)).div_ceil(world_size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn the_root_ends_with_the_sum_and_the_others_with_what_they_had() {
        for world_size in 1..=9 {
            for (len, segment) in [(0, 1), (1, 100), (world_size - 1, 100), (50, 100), (50, 7), (51, 0)] {
                let root = len % world_size;
                let all = schedules(world_size, |rank| schedule(rank, world_size, len, root, segment));
                let buffers = run(&all, len + room(world_size, len, segment));
                for (index, element) in buffers[root][..len].iter().enumerate() {
                    assert_eq!(element.order(), (0..world_size).collect::<Vec<_>>(), "element {index}");
                }
                for (rank, buffer) in buffers.iter().enumerate().filter(|(rank, _)| *rank != root) {
                    assert!((0..len).all(|index| buffer[index].origin() == Some((rank, index))));
                }
            }
        }
    }

    #[test]
    fn cost() {
        let sent = |rank| schedule(rank, 4, 1000, 2, 500).elements_sent();
        assert_eq!((sent(0), sent(2)), (1000, 750));
    }
}
