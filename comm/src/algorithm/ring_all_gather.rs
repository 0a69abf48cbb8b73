//! Ring all-gather: each rank's part goes once round the ring.

use crate::schedule::{Combine, Schedule, Step, Transfer, part};

/// Works on the output, whose `rank`-th part already holds this rank's input.
///
/// # Cost
/// P-1 steps; each rank sends (P-1)/P of the output.
///
/// # Source
/// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 4.
pub fn schedule(rank: usize, world_size: usize, len: usize) -> Schedule {
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let step = |s: usize| {
        let send = rank + world_size - s;
        Step {
            finished: 0..0,
            transfers: vec![
                Transfer::Send { to: next, range: part(len, world_size, send) },
                Transfer::Recv {
                    from: previous,
                    range: part(len, world_size, send - 1),
                    combine: Combine::Replace,
                },
            ],
        }
    };
    Schedule { steps: (0..world_size.saturating_sub(1)).map(step).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn every_rank_ends_with_every_part() {
        for world_size in 1..=9 {
            for len in [0, world_size, 5 * world_size] {
                let all = schedules(world_size, |rank| schedule(rank, world_size, len));
                for (rank, buffer) in run(&all, len).iter().enumerate() {
                    for owner in 0..world_size {
                        assert!(buffer[part(len, world_size, owner)].iter().all(|e| e.sorted() == [owner]));
                    }
                    assert_eq!(all[rank].elements_sent(), (world_size - 1) * len / world_size);
                }
            }
        }
    }
}
