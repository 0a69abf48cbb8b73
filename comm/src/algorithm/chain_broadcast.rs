//! Pipelined chain broadcast: the buffer is sent from rank to rank in segments. While one segment is received, the one
//! before it is sent on.

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer, part};

/// # Cost
/// P-2+k steps for k segments; each rank but the last sends the buffer once, whatever the number of ranks.
///
/// # Source
/// Barnett, Littlefield, Payne and van de Geijn, "On the efficiency of global combine algorithms for 2-D meshes with
/// wormhole routing", 1995.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize, root: usize, segments: usize) -> Schedule {
    // Position in the chain: ranks counted from the root.
    let place = (rank + world_size - root) % world_size;
    let (previous, next) = ((rank + world_size - 1) % world_size, (rank + 1) % world_size);
    let receives = |s: usize| place > 0 && s < segments;
    // The root need not wait for a segment to arrive.
    let sent = |s: usize| if place == 0 { Some(s) } else { s.checked_sub(1) };
    let step = |s: usize| {
        let mut transfers = Vec::new();
        if receives(s) {
            let range = part(len, segments, s);
            transfers.push(Transfer::Recv { from: previous, range, combine: Combine::Replace });
        }
        if let Some(s) = sent(s).filter(|s| place + 1 < world_size && *s < segments) {
            transfers.push(Transfer::Send { to: next, range: part(len, segments, s) });
        }
        ScheduleStep { transfers, finished: 0..0 }
    };
    Schedule { steps: (0..=segments).map(step).filter(|step| !step.transfers.is_empty()).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run, schedules};

    #[test]
    fn every_rank_ends_with_the_buffer_of_the_root() {
        for (world_size, segments) in [(1, 1), (2, 1), (2, 4), (3, 3), (8, 5), (9, 1), (1000, 10)] {
            for root in [0, world_size / 2, world_size - 1] {
                for len in [0, 1, 13] {
                    let all = schedules(world_size, |rank| schedule(rank, world_size, len, root, segments));
                    for buffer in run(&all, len) {
                        assert!(buffer.iter().enumerate().all(|(i, e)| e.origin() == Some((root, i))));
                    }
                    for (rank, schedule) in all.iter().enumerate() {
                        let is_last = (rank + 1) % world_size == root;
                        assert_eq!(schedule.elements_sent(), if is_last { 0 } else { len });
                        assert!(schedule.steps.len() <= segments + 1);
                    }
                }
            }
        }
    }
}
