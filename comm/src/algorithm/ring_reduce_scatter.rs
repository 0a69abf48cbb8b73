//! Ring reduce-scatter: each part goes once round the ring, being summed, and ends at its own rank.

use crate::schedule::{Combine, Schedule, Step, Transfer, part};

/// Works on a copy of the input, whose `rank`-th part is the result.
///
/// # Cost
/// P-1 steps; each rank sends (P-1)/P of the input.
///
/// # Source
/// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 4.
pub fn schedule(rank: usize, world_size: usize, len: usize) -> Schedule {
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let rounds = world_size.saturating_sub(1);
    let step = |s: usize| {
        let send = rank + 2 * world_size - 1 - s;
        let received = part(len, world_size, send - 1);
        Step {
            finished: if s + 1 == rounds { received.clone() } else { 0..0 },
            transfers: vec![
                Transfer::Send { to: next, range: part(len, world_size, send) },
                Transfer::Recv { from: previous, range: received, combine: Combine::TheirsFirst },
            ],
        }
    };
    Schedule { steps: (0..rounds).map(step).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn each_rank_ends_with_the_sum_of_its_part() {
        for world_size in 1..=9 {
            for len in [0, world_size, 5 * world_size] {
                let all = schedules(world_size, |rank| schedule(rank, world_size, len));
                for (rank, buffer) in run(&all, len).iter().enumerate() {
                    for element in &buffer[part(len, world_size, rank)] {
                        assert_eq!(element.sorted(), (0..world_size).collect::<Vec<_>>());
                    }
                    assert_eq!(all[rank].elements_sent(), (world_size - 1) * len / world_size);
                }
            }
        }
    }
}
