//! Binomial tree reduce: the tree of the broadcast, from the leaves to the root.

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer};

/// Works on a copy of the tensor, except on the root.
///
/// # Cost
/// log2(P) steps, rounded up; each rank but the root sends the buffer once.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize, root: usize) -> Schedule {
    // Position in the tree: ranks counted from the root.
    let place = (rank + world_size - root) % world_size;
    let rank_at = |place: usize| (place + root) % world_size;
    let mut steps = Vec::new();
    let rounds = world_size.max(1).next_power_of_two().ilog2();
    for k in 0..rounds {
        let distance = 1 << k;
        let is_sender = place & distance != 0;
        let transfer = if is_sender {
            Transfer::Send { to: rank_at(place - distance), range: 0..len }
        } else if place + distance < world_size {
            let from = rank_at(place + distance);
            Transfer::Recv { from, range: 0..len, combine: Combine::MineFirst }
        } else {
            continue;
        };
        steps.push(ScheduleStep { transfers: vec![transfer], finished: 0..0 });
        if is_sender {
            break;
        }
    }
    if let (0, Some(last)) = (place, steps.last_mut()) {
        last.finished = 0..len;
    }
    Schedule { steps }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn the_root_ends_with_the_sum_in_order() {
        for world_size in 1..=17 {
            for root in 0..world_size {
                let all = schedules(world_size, |rank| schedule(rank, world_size, 2, root));
                let expected: Vec<_> = (0..world_size).map(|place| (place + root) % world_size).collect();
                assert!(run(&all, 2)[root].iter().all(|element| element.order() == expected));
                assert!(
                    all.iter().enumerate().all(|(r, s)| s.elements_sent() == if r == root { 0 } else { 2 })
                );
            }
        }
    }
}
