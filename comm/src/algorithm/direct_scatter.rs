//! Direct scatter: the root sends every rank its part.

use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

/// Works on the input, on the root only, then the output of this rank.
///
/// # Cost
/// One step; the root sends all parts but its own, each byte once.
///
/// # Source
/// Gloo's scatter, `gloo/scatter.cc`, is of this kind.
pub(crate) fn schedule(rank: usize, parts: &Parts, root: usize) -> Schedule {
    let own = parts.of(rank);
    if rank != root {
        let receive = Transfer::Recv { from: root, range: 0..own.len(), combine: Combine::Replace };
        return Schedule { steps: vec![ScheduleStep { transfers: vec![receive], finished: 0..0 }] };
    }
    let others = (0..parts.count()).filter(|other| *other != root);
    let send = |to: usize| Transfer::Send { to, range: parts.of(to) };
    let sends = ScheduleStep { transfers: others.map(send).collect(), finished: 0..0 };
    Schedule { steps: vec![sends] }.then(Schedule::copying(own, parts.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run_uneven, schedules};

    fn check(parts: &Parts, root: usize) {
        let all = schedules(parts.count(), |rank| schedule(rank, parts, root));
        let input = |rank: usize| if rank == root { parts.len() } else { 0 };
        let buffers = run_uneven(&all, |rank| input(rank) + parts.of(rank).len());
        for (rank, buffer) in buffers.iter().enumerate() {
            let output = &buffer[input(rank)..];
            assert!(output.iter().zip(parts.of(rank)).all(|(e, index)| e.origin() == Some((root, index))));
        }
        assert_eq!(all[root].elements_sent(), parts.len() - parts.of(root).len());
    }

    #[test]
    fn every_rank_ends_with_its_part() {
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
