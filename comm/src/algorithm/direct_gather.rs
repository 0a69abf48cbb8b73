//! Direct gather: every rank sends its part to the root, which receives all of them at the same time.

use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

/// Works on the input of this rank, then, on the root, the output.
///
/// # Cost
/// One step; each rank but the root sends its part once, so that the root's link carries no byte twice.
///
/// # Source
/// Gloo's gather, `gloo/gather.cc`, is of this kind.
pub(crate) fn schedule(rank: usize, parts: &Parts, root: usize) -> Schedule {
    let own = 0..parts.of(rank).len();
    if rank != root {
        let transfers = vec![Transfer::Send { to: root, range: own }];
        return Schedule { steps: vec![ScheduleStep { transfers, finished: 0..0 }] };
    }
    let place = |rank: usize| {
        let part = parts.of(rank);
        own.end + part.start..own.end + part.end
    };
    let others = (0..parts.count()).filter(|other| *other != root);
    let receive = |from: usize| Transfer::Recv { from, range: place(from), combine: Combine::Replace };
    let receives = ScheduleStep { transfers: others.map(receive).collect(), finished: 0..0 };
    Schedule::copying(own.clone(), place(rank).start).then(Schedule { steps: vec![receives] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run_uneven, schedules};

    fn check(parts: &Parts, root: usize) {
        let all = schedules(parts.count(), |rank| schedule(rank, parts, root));
        let output = |rank: usize| if rank == root { parts.len() } else { 0 };
        let buffers = run_uneven(&all, |rank| parts.of(rank).len() + output(rank));
        for (owner, schedule) in all.iter().enumerate() {
            let part = parts.of(owner);
            let gathered = &buffers[root][parts.of(root).len()..][part.clone()];
            assert!(gathered.iter().enumerate().all(|(i, element)| element.origin() == Some((owner, i))));
            let sent = if owner == root { 0 } else { part.len() };
            assert_eq!(schedule.elements_sent(), sent);
        }
    }

    #[test]
    fn the_root_ends_with_every_part() {
        for world_size in 1..=9 {
            for root in 0..world_size {
                check(&Parts::even(4 * world_size, world_size), root);
                let counts: Vec<usize> = (0..world_size).map(|rank| 5 * rank % 4).collect();
                check(&Parts::uneven(&counts), root);
            }
        }
        check(&Parts::even(2000, 1000), 7);
    }
}
