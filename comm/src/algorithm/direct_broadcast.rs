//! Direct broadcast: the root sends the buffer to each other rank, all at the same time.

use crate::algorithm::direct_barrier::others;
use crate::algorithm::schedule::{Combine, Schedule, Step, Transfer};

/// # Cost
/// One step; the root sends the buffer P-1 times.
pub fn schedule(rank: usize, world_size: usize, len: usize, root: usize) -> Schedule {
    let transfers = match rank == root {
        true => others(root, world_size).map(|to| Transfer::Send { to, range: 0..len }).collect(),
        false => vec![Transfer::Recv { from: root, range: 0..len, combine: Combine::Replace }],
    };
    Schedule { steps: vec![Step { transfers, finished: 0..0 }] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn every_rank_ends_with_the_buffer_of_the_root() {
        for world_size in 1..=9 {
            for root in 0..world_size {
                let all = schedules(world_size, |rank| schedule(rank, world_size, 3, root));
                for buffer in run(&all, 3) {
                    assert!(buffer.iter().enumerate().all(|(i, e)| e.origin() == Some((root, i))));
                }
                for (rank, schedule) in all.iter().enumerate() {
                    let sent = if rank == root { 3 * (world_size - 1) } else { 0 };
                    assert_eq!(schedule.elements_sent(), sent);
                }
            }
        }
    }
}
