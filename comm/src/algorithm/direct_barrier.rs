//! Direct barrier: each rank tells each other one that it is there, all at the same time.

use crate::algorithm::schedule::{Combine, Schedule, Step, Transfer};

/// Works on no buffer: that a rank has announced its call is all that the others wait for.
///
/// # Cost
/// One step of P-1 messages without elements: for few ranks, which would take more steps otherwise.
pub fn schedule(rank: usize, world_size: usize) -> Schedule {
    let exchange = |peer: usize| {
        let receive = Transfer::Recv { from: peer, range: 0..0, combine: Combine::Replace };
        [Transfer::Send { to: peer, range: 0..0 }, receive]
    };
    let transfers: Vec<Transfer> = others(rank, world_size).flat_map(exchange).collect();
    Schedule {
        steps: if transfers.is_empty() { Vec::new() } else { vec![Step { transfers, finished: 0..0 }] },
    }
}

/// The ranks behind this one, then those before it.
pub(super) fn others(rank: usize, world_size: usize) -> impl Iterator<Item = usize> {
    (1..world_size).map(move |distance| (rank + distance) % world_size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn every_rank_hears_of_every_other_rank_in_one_step() {
        for world_size in 1..=9 {
            let all = schedules(world_size, |rank| schedule(rank, world_size));
            // Each message that is sent is received.
            run(&all, 0);
            for (rank, schedule) in all.iter().enumerate() {
                let mut peers = schedule.peers();
                peers.sort_unstable();
                assert_eq!(peers, (0..world_size).filter(|peer| *peer != rank).collect::<Vec<_>>());
                assert_eq!(schedule.steps.len(), usize::from(world_size > 1));
            }
        }
    }
}
