//! Pipelined chain reduce: partial sums are sent from rank to rank towards the root, in segments. While one segment is
//! received, the one before it is sent on.

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer, part};

/// Works on the tensor, then, on ranks other than the root, scratch space for two partial sums, see [`room`].
///
/// # Cost
/// P-2+k steps for k segments; each rank but the root sends the buffer once, and each receives it once at most.
///
/// # Source
/// Barnett, Littlefield, Payne and van de Geijn, "On the efficiency of global combine algorithms for 2-D meshes with
/// wormhole routing", 1995.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize, root: usize, segments: usize) -> Schedule {
    // Position in the chain: ranks counted from the root, which is at position 0.
    let place = (rank + world_size - root) % world_size;
    let (towards_root, away) = ((rank + world_size - 1) % world_size, (rank + 1) % world_size);
    let is_last = place + 1 == world_size;
    let segment = |s: usize| part(len, segments, s);
    let sum = |s: usize| {
        let start = if place == 0 { segment(s).start } else { len + s % 2 * room(len, segments) / 2 };
        start..start + segment(s).len()
    };
    let sent = |s: usize| if is_last { Some(s) } else { s.checked_sub(1) };
    let step = |s: usize| {
        let mut step = ScheduleStep::default();
        if !is_last && s < segments {
            let (mine, combine) = (segment(s).start, Combine::MineFirst);
            step.transfers.push(Transfer::Fold { from: away, range: sum(s), mine, combine });
            step.finished = if place == 0 { sum(s) } else { 0..0 };
        }
        if let Some(s) = sent(s).filter(|s| place > 0 && *s < segments) {
            let range = if is_last { segment(s) } else { sum(s) };
            step.transfers.push(Transfer::Send { to: towards_root, range });
        }
        step
    };
    Schedule { steps: (0..=segments).map(step).filter(|step| !step.transfers.is_empty()).collect() }
}

/// Returns the number of elements of two segments.
pub(crate) fn room(len: usize, segments: usize) -> usize {
    2 * len.div_ceil(segments.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run_uneven, schedules};

    #[test]
    fn the_root_ends_with_the_sum_and_the_others_keep_theirs() {
        for (world_size, segments) in [(1, 1), (2, 1), (2, 4), (3, 3), (8, 5), (9, 1), (300, 10)] {
            for root in [0, world_size / 2, world_size - 1] {
                for len in [0, 1, 13] {
                    let all = schedules(world_size, |rank| schedule(rank, world_size, len, root, segments));
                    let buffers =
                        run_uneven(&all, |rank| len + if rank == root { 0 } else { room(len, segments) });
                    let expected: Vec<_> = (0..world_size).map(|place| (place + root) % world_size).collect();
                    for (rank, buffer) in buffers.iter().enumerate() {
                        for (index, element) in buffer[..len].iter().enumerate() {
                            if rank == root {
                                assert_eq!(element.order(), expected);
                            } else {
                                assert_eq!(element.origin(), Some((rank, index)));
                            }
                        }
                        assert_eq!(all[rank].elements_sent(), if rank == root { 0 } else { len });
                    }
                }
            }
        }
    }
}
