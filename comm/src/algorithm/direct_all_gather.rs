//! Direct all-gather: each rank sends its part to each other one, all at the same time.

use crate::algorithm::direct_barrier::others;
use crate::algorithm::schedule::{Combine, Parts, Schedule, Step, Transfer};

/// Works on the output, whose `rank`-th part already holds this rank's input.
///
/// # Cost
/// One step; each rank sends its part P-1 times: as many bytes as round a ring, where parts are even.
pub fn schedule(rank: usize, parts: &Parts) -> Schedule {
    let exchange = |peer: usize| {
        let receive = Transfer::Recv { from: peer, range: parts.of(peer), combine: Combine::Replace };
        [Transfer::Send { to: peer, range: parts.of(rank) }, receive]
    };
    let transfers = others(rank, parts.count()).flat_map(exchange).collect();
    Schedule { steps: vec![Step { transfers, finished: 0..0 }] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    fn check(parts: &Parts) {
        let all = schedules(parts.count(), |rank| schedule(rank, parts));
        for buffer in run(&all, parts.len()) {
            for owner in 0..parts.count() {
                assert!(parts.of(owner).all(|index| buffer[index].origin() == Some((owner, index))));
            }
        }
        for (rank, schedule) in all.iter().enumerate() {
            assert_eq!(schedule.elements_sent(), (parts.count() - 1) * parts.of(rank).len());
        }
    }

    #[test]
    fn every_rank_ends_with_every_part() {
        for world_size in 1..=9 {
            for len in [0, world_size, 5 * world_size] {
                check(&Parts::even(len, world_size));
            }
            let counts: Vec<usize> = (0..world_size).map(|rank| 5 * rank % 4).collect();
            check(&Parts::uneven(&counts));
        }
    }
}
