//! Ring all-gather: each rank's part is sent once around the ring.

use std::ops::Range;

use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

/// Works on the output, whose `rank`-th part already holds this rank's input.
///
/// # Cost
/// P-1 steps; each rank sends (P-1)/P of the output; with uneven parts, all but the next rank's.
///
/// # Source
/// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 4.
pub(crate) fn schedule(rank: usize, parts: &Parts) -> Schedule {
    schedule_of(rank, parts.count(), |rank| parts.of(rank))
}

/// The same for parts at any ranges; the rank passed to `part` is not reduced modulo `world_size`.
pub(super) fn schedule_of(rank: usize, world_size: usize, part: impl Fn(usize) -> Range<usize>) -> Schedule {
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let step = |s: usize| {
        let send = rank + world_size - s;
        ScheduleStep {
            finished: 0..0,
            transfers: vec![
                Transfer::Send { to: next, range: part(send) },
                Transfer::Recv { from: previous, range: part(send - 1), combine: Combine::Replace },
            ],
        }
    };
    Schedule { steps: (0..world_size.saturating_sub(1)).map(step).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::all_gathers;

    fn check(parts: &Parts) -> Vec<Schedule> {
        all_gathers(parts, |rank| schedule(rank, parts))
    }

    #[test]
    fn every_rank_ends_with_every_part() {
        for world_size in 1..=9 {
            for len in [0, world_size, 5 * world_size] {
                for schedule in check(&Parts::even(len, world_size)) {
                    assert_eq!(schedule.elements_sent(), (world_size - 1) * len / world_size);
                    assert_eq!(schedule.steps.len(), world_size - 1);
                }
            }
            let counts: Vec<usize> = (0..world_size).map(|rank| 5 * rank % 4).collect();
            for (rank, schedule) in check(&Parts::uneven(&counts)).iter().enumerate() {
                let spared = counts[(rank + 1) % world_size];
                assert_eq!(schedule.elements_sent(), counts.iter().sum::<usize>() - spared);
            }
        }
    }

    #[test]
    fn a_thousand_ranks() {
        check(&Parts::even(1000, 1000));
    }
}
