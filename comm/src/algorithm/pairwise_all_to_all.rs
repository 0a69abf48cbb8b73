//! Pairwise all-to-all: in step s each rank sends to the rank at distance s ahead, and receives from the one at
//! distance s behind.

use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

/// Works on the input, divided as in `input`, then the output, divided as in `output`.
///
/// # Cost
/// P-1 steps; each rank sends all of its input but its own part, every byte directly to its destination.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4.
pub(crate) fn schedule(rank: usize, input: &Parts, output: &Parts) -> Schedule {
    let world_size = input.count();
    let place = |from: usize| {
        let part = output.of(from);
        input.len() + part.start..input.len() + part.end
    };
    let step = |s: usize| {
        let (to, from) = ((rank + s) % world_size, (rank + world_size - s) % world_size);
        ScheduleStep {
            finished: 0..0,
            transfers: vec![
                Transfer::Send { to, range: input.of(to) },
                Transfer::Recv { from, range: place(from), combine: Combine::Replace },
            ],
        }
    };
    let steps = (1..world_size).map(step).collect();
    Schedule::copying(input.of(rank), place(rank).start).then(Schedule { steps })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{run_uneven, schedules};

    fn check(world_size: usize, count: impl Fn(usize, usize) -> usize) {
        let input = |rank| Parts::uneven(&(0..world_size).map(|to| count(rank, to)).collect::<Vec<_>>());
        let output = |rank| Parts::uneven(&(0..world_size).map(|from| count(from, rank)).collect::<Vec<_>>());
        let all = schedules(world_size, |rank| schedule(rank, &input(rank), &output(rank)));
        let buffers = run_uneven(&all, |rank| input(rank).len() + output(rank).len());
        for (rank, buffer) in buffers.iter().enumerate() {
            let (mine, output) = (input(rank), output(rank));
            for from in 0..world_size {
                let expected = input(from).of(rank).map(|index| Some((from, index)));
                let got = output.of(from).map(|index| buffer[mine.len() + index].origin());
                assert!(got.eq(expected));
            }
            assert_eq!(all[rank].elements_sent(), mine.len() - mine.of(rank).len());
        }
    }

    #[test]
    fn every_part_ends_where_it_belongs() {
        for world_size in 1..=9 {
            check(world_size, |_, _| 3);
            check(world_size, |from, to| (5 * from + 3 * to) % 4);
        }
        check(300, |_, _| 1);
    }
}
