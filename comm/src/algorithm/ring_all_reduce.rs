//! Ring all-reduce: parts of the buffer are sent around the ring twice, first to be summed, then to be copied.

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer, part};

/// # Cost
/// 2(P-1) steps; each rank sends 2(P-1)/P of the buffer.
///
/// # Source
/// Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 4.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize) -> Schedule {
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let step = |send: usize, recv: usize, combine: Combine, last: bool| {
        let received = part(len, world_size, recv);
        ScheduleStep {
            finished: if last { received.clone() } else { 0..0 },
            transfers: vec![
                Transfer::Send { to: next, range: part(len, world_size, send) },
                Transfer::Recv { from: previous, range: received, combine },
            ],
        }
    };
    let rounds = world_size.saturating_sub(1);
    // `+ world_size` keeps the differences positive; `part` takes them modulo the world size.
    let reduce = (0..rounds).map(|s| {
        let first = rank + world_size - s;
        step(first, first - 1, Combine::TheirsFirst, s + 1 == rounds)
    });
    let gather = (0..rounds).map(|s| {
        let first = rank + world_size + 1 - s;
        step(first, first - 1, Combine::Replace, false)
    });
    Schedule { steps: reduce.chain(gather).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{check_all_reduce, schedules};

    #[test]
    fn sums_on_every_rank_at_the_stated_cost() {
        for world_size in 1..=9 {
            for len in [0, 1, world_size - 1, world_size, 4 * world_size, 4 * world_size + 1] {
                check_all_reduce(&schedules(world_size, |rank| schedule(rank, world_size, len)), len);
            }
            let len = 3 * world_size;
            for rank in 0..world_size {
                let schedule = schedule(rank, world_size, len);
                assert_eq!(schedule.steps.len(), 2 * (world_size - 1));
                assert_eq!(schedule.elements_sent(), 2 * (world_size - 1) * len / world_size);
            }
        }
    }

    #[test]
    fn a_thousand_ranks() {
        check_all_reduce(&schedules(1000, |rank| schedule(rank, 1000, 1003)), 1003);
    }
}
