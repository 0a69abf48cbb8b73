//! Direct all-gather: each rank sends its part to all others at once.

use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

/// Works on the output, whose `rank`-th part already holds this rank's input. With empty parts it is a barrier.
///
/// # Cost
/// One step, in which each rank sends P-1 messages and (P-1)/P of the output with equal parts: as many bytes as around a ring,
/// but no rank waits for what another one has yet to receive. Where ranks share cores, each of those waits is a context
/// switch.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 3.
pub(crate) fn schedule(rank: usize, parts: &Parts) -> Schedule {
    let world_size = parts.count();
    if world_size < 2 {
        return Schedule::default();
    }
    let mut transfers = Vec::with_capacity(2 * (world_size - 1));
    // Each rank begins with the next one, so that no rank gets all messages first or last.
    for distance in 1..world_size {
        let (to, from) = ((rank + distance) % world_size, (rank + world_size - distance) % world_size);
        transfers.push(Transfer::Send { to, range: parts.of(rank) });
        transfers.push(Transfer::Recv { from, range: parts.of(from), combine: Combine::Replace });
    }
    Schedule { steps: vec![ScheduleStep { transfers, finished: 0..0 }] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::all_gathers;
    use crate::{Topology, algorithm};

    fn check(parts: &Parts) -> Vec<Schedule> {
        all_gathers(parts, |rank| schedule(rank, parts))
    }

    #[test]
    fn every_rank_ends_with_every_part() {
        for world_size in 1..=9 {
            for len in [0, world_size, 5 * world_size] {
                for schedule in check(&Parts::even(len, world_size)) {
                    assert_eq!(schedule.elements_sent(), (world_size - 1) * len / world_size);
                }
            }
            let counts: Vec<usize> = (0..world_size).map(|rank| 5 * rank % 4).collect();
            check(&Parts::uneven(&counts));
        }
    }

    #[test]
    fn only_a_few_ranks_that_share_memory_send_directly() {
        for (ranks, shares, steps) in [(16, true, 1), (17, true, 5), (16, false, 4), (1, true, 0)] {
            let topology = Topology::one_host(ranks).sharing_memory(shares);
            assert_eq!(algorithm::barrier(0, &topology).steps.len(), steps, "{ranks} ranks");
            let gather = algorithm::all_gather(0, &topology, &Parts::even(ranks, ranks));
            let expected = if steps == 1 { 1 } else { ranks - 1 };
            assert_eq!(gather.steps.len(), expected, "{ranks} ranks");
        }
    }

    /// A barrier: every rank hears of every other one, although nothing is sent.
    #[test]
    fn without_elements_all_ranks_meet() {
        for (rank, schedule) in check(&Parts::even(0, 7)).iter().enumerate() {
            let mut peers = schedule.peers();
            peers.sort_unstable();
            assert_eq!(peers, (0..7).filter(|peer| *peer != rank).collect::<Vec<_>>());
        }
    }
}
