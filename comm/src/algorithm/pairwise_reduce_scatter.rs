//! Pairwise reduce-scatter: each rank receives the others' values of its part, unreduced, and reduces them itself, in
//! the order of ranks. Elements that are reduced in a wider dtype are sent in the narrow one, and rounded once.

use std::ops::Range;

use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

/// Works on the input, then the output, then scratch space for the others' values, see [`room`].
///
/// # Cost
/// 1 step; each rank sends (P-1)/P of the input; with uneven parts, all but its own.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, reduce-scatter by
/// pairwise exchange; here all pairs at the same time.
pub(crate) fn schedule(rank: usize, parts: &Parts) -> Schedule {
    let own = parts.of(rank);
    let output = parts.len()..parts.len() + own.len();
    let exchange = exchange(rank, parts, 0, output.end);
    let sum = sum(rank, parts.count(), own.start, output.end, output);
    Schedule { steps: vec![exchange, ScheduleStep { transfers: vec![sum], finished: 0..0 }] }
}

/// Returns the number of elements of the buffer beyond input and output.
pub(crate) fn room(rank: usize, parts: &Parts) -> usize {
    (parts.count() - 1) * parts.of(rank).len()
}

/// Returns the other ranks, beginning with the next one.
pub(super) fn others(rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
    (1..world_size).map(move |distance| (rank + distance) % world_size)
}

/// Sends each part of the buffer that begins at `first` to its rank, and gathers the values for this rank's part at
/// `room`, by rank.
pub(super) fn exchange(rank: usize, parts: &Parts, first: usize, room: usize) -> ScheduleStep {
    let own = parts.of(rank).len();
    let transfers = others(rank, parts.count()).flat_map(|peer| {
        let part = parts.of(peer);
        let place = place(rank, peer, room, own);
        let recv = Transfer::Recv { from: peer, range: place..place + own, combine: Combine::Replace };
        [Transfer::Send { to: peer, range: first + part.start..first + part.end }, recv]
    });
    ScheduleStep { transfers: transfers.collect(), finished: 0..0 }
}

/// Reduces the values that [`exchange`] has gathered at `room`, and this rank's values, which begin at `own`, into
/// `target`.
pub(super) fn sum(rank: usize, world_size: usize, own: usize, room: usize, target: Range<usize>) -> Transfer {
    let place = |peer| if peer == rank { own } else { place(rank, peer, room, target.len()) };
    Transfer::Reduce { places: (0..world_size).map(place).collect(), range: target }
}

/// Returns the index at which the values of a peer are stored.
fn place(rank: usize, peer: usize, room: usize, len: usize) -> usize {
    room + if peer < rank { peer } else { peer - 1 } * len
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run_uneven, schedules};

    fn check(parts: &Parts) {
        let world_size = parts.count();
        let all = schedules(world_size, |rank| schedule(rank, parts));
        let buffers = run_uneven(&all, |rank| parts.len() + parts.of(rank).len() + room(rank, parts));
        for (rank, buffer) in buffers.iter().enumerate() {
            for element in &buffer[parts.len()..][..parts.of(rank).len()] {
                assert_eq!(element.order(), (0..world_size).collect::<Vec<_>>(), "the order of ranks");
            }
            assert!((0..parts.len()).all(|index| buffer[index].origin() == Some((rank, index))));
            assert_eq!(all[rank].elements_sent(), parts.len() - parts.of(rank).len());
        }
    }

    #[test]
    fn each_rank_ends_with_the_sum_of_its_part_in_the_order_of_ranks() {
        for world_size in 1..=9 {
            for len in [0, world_size, 5 * world_size] {
                check(&Parts::even(len, world_size));
            }
            check(&Parts::uneven(&(0..world_size).map(|rank| 5 * rank % 4).collect::<Vec<_>>()));
        }
        check(&Parts::even(64, 64));
    }
}
