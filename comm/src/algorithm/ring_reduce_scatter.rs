//! Ring reduce-scatter: each part is sent once around the ring, being summed, and ends at its own rank. Parts are
//! divided into pieces that go around one after the other, see [`super::segmented`].

use std::ops::Range;

use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer, piece};

/// Works on the input, then the output, then scratch space for a piece of two parts, see [`room`]. Parts are divided
/// into `pieces` pieces, 1 or more.
///
/// # Cost
/// P-1 steps for each piece; each rank sends (P-1)/P of the input; with uneven parts, all but its own.
///
/// # Source
/// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 4.
pub(crate) fn schedule(rank: usize, parts: &Parts, pieces: usize) -> Schedule {
    let world_size = parts.count();
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let rounds = world_size.saturating_sub(1);
    let (own, longest) = (parts.of(rank), parts.longest().div_ceil(pieces));
    let whole = parts.len()..parts.len() + own.len();
    // A partial sum is in one of two scratch ranges; the sum before it, which is being sent, in the other one.
    let place = |s: usize, len: usize| {
        let start = whole.end + s % 2 * longest;
        start..start + len
    };
    let step = |index: usize, s: usize| {
        let piece = |range: Range<usize>| piece(&range, pieces, index);
        let output = piece(whole.clone());
        // `2 * world_size` keeps the differences positive; `Parts::of` takes them modulo the number of parts.
        let send = rank + 2 * world_size - 1 - s;
        let (sent, mine) = (piece(parts.of(send)), piece(parts.of(send - 1)));
        let last = s + 1 == rounds;
        let range = if last { output.clone() } else { place(s, mine.len()) };
        ScheduleStep {
            finished: if last { output.clone() } else { 0..0 },
            transfers: vec![
                Transfer::Send { to: next, range: if s == 0 { sent } else { place(s - 1, sent.len()) } },
                Transfer::Fold { from: previous, range, mine: mine.start, combine: Combine::TheirsFirst },
            ],
        }
    };
    if rounds == 0 {
        return Schedule::copying(own, whole.start);
    }
    let steps = (0..pieces).flat_map(|index| (0..rounds).map(move |s| (index, s)));
    Schedule { steps: steps.map(|(index, s)| step(index, s)).collect() }
}

/// Returns the number of elements of the buffer beyond input and output.
pub(crate) fn room(parts: &Parts, pieces: usize) -> usize {
    let longest = parts.longest().div_ceil(pieces);
    match parts.count() {
        0..=2 => 0,
        3 => longest,
        _ => 2 * longest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run_uneven, schedules};

    fn check(parts: &Parts, pieces: usize) -> Vec<Schedule> {
        let all = schedules(parts.count(), |rank| schedule(rank, parts, pieces));
        let buffers = run_uneven(&all, |rank| parts.len() + parts.of(rank).len() + room(parts, pieces));
        for (rank, buffer) in buffers.iter().enumerate() {
            for element in &buffer[parts.len()..][..parts.of(rank).len()] {
                assert_eq!(element.sorted(), (0..parts.count()).collect::<Vec<_>>());
            }
            assert!((0..parts.len()).all(|index| buffer[index].origin() == Some((rank, index))));
        }
        all
    }

    #[test]
    fn each_rank_ends_with_the_sum_of_its_part() {
        for world_size in 1..=9 {
            for (len, pieces) in
                [(0, 1), (world_size, 1), (5 * world_size, 1), (5 * world_size, 2), (world_size, 3)]
            {
                for schedule in check(&Parts::even(len, world_size), pieces) {
                    assert_eq!(schedule.elements_sent(), (world_size - 1) * len / world_size);
                }
            }
            let counts: Vec<usize> = (0..world_size).map(|rank| 5 * rank % 4).collect();
            for (rank, schedule) in check(&Parts::uneven(&counts), 2).iter().enumerate() {
                assert_eq!(schedule.elements_sent(), counts.iter().sum::<usize>() - counts[rank]);
            }
        }
    }

    #[test]
    fn a_thousand_ranks() {
        check(&Parts::even(1000, 1000), 1);
    }
}
