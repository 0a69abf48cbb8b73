//! Dissemination barrier: in step k each rank notifies the rank at a distance of 2^k that it, and all ranks whose
//! notifications it has received, have reached the barrier.

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer};

/// Works on a buffer of one element, whose value does not matter.
///
/// # Cost
/// log2(P) steps, rounded up, of one element.
///
/// # Source
/// Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988, section 3.
pub(crate) fn schedule(rank: usize, world_size: usize) -> Schedule {
    let rounds = world_size.max(1).next_power_of_two().ilog2();
    let step = |k: u32| {
        let distance = 1 << k;
        ScheduleStep {
            finished: 0..0,
            transfers: vec![
                Transfer::Send { to: (rank + distance) % world_size, range: 0..1 },
                Transfer::Recv {
                    from: (rank + world_size - distance) % world_size,
                    range: 0..1,
                    combine: Combine::TheirsFirst,
                },
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
    fn every_rank_has_heard_of_every_rank() {
        for world_size in (1..=17).chain([1000]) {
            let all = schedules(world_size, |rank| schedule(rank, world_size));
            for buffer in run(&all, 1) {
                let mut heard = buffer[0].sorted();
                heard.dedup();
                assert_eq!(heard, (0..world_size).collect::<Vec<_>>());
            }
        }
    }
}
