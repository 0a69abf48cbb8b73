//! Binomial tree broadcast: in each step, every rank that has the buffer sends it to one that has not.

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer};

/// # Cost
/// log2(P) steps, rounded up; the root sends the buffer that many times.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 3.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize, root: usize) -> Schedule {
    // Position in the tree: ranks counted from the root.
    let place = (rank + world_size - root) % world_size;
    let rank_at = |place: usize| (place + root) % world_size;
    let mut steps = Vec::new();
    let rounds = world_size.max(1).next_power_of_two().ilog2();
    for k in 0..rounds {
        let distance = 1 << k;
        let transfer = if place < distance && place + distance < world_size {
            Transfer::Send { to: rank_at(place + distance), range: 0..len }
        } else if (distance..2 * distance).contains(&place) {
            Transfer::Recv { from: rank_at(place - distance), range: 0..len, combine: Combine::Replace }
        } else {
            continue;
        };
        steps.push(ScheduleStep { transfers: vec![transfer], finished: 0..0 });
    }
    Schedule { steps }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn every_rank_ends_with_the_buffer_of_the_root() {
        for world_size in 1..=17 {
            for root in 0..world_size {
                let all = schedules(world_size, |rank| schedule(rank, world_size, 2, root));
                assert!(run(&all, 2).iter().flatten().all(|element| element.sorted() == [root]));
            }
        }
    }
}
