//! Recursive doubling all-reduce: in step k, ranks at a distance of 2^k exchange and reduce the whole buffer. Few
//! steps, more bytes.

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer};

/// If the world size is no power of two, the first ranks form pairs before, and the second rank of each pair takes part
/// for both.
///
/// # Cost
/// log2(P) steps, in each of which each rank sends the whole buffer; two steps more if P is no power of two.
///
/// # Source
/// Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4.
pub(crate) fn schedule(rank: usize, world_size: usize, len: usize) -> Schedule {
    let doubling = 1 << world_size.max(1).ilog2();
    let pairs = world_size.saturating_sub(doubling);
    let send = |to: usize| Transfer::Send { to, range: 0..len };
    let recv = |from: usize, combine: Combine| Transfer::Recv { from, range: 0..len, combine };
    let step = |transfers: Vec<Transfer>| ScheduleStep { transfers, finished: 0..0 };

    if rank < 2 * pairs && rank.is_multiple_of(2) {
        let partner = rank + 1;
        return Schedule {
            steps: vec![step(vec![send(partner)]), step(vec![recv(partner, Combine::Replace)])],
        };
    }
    let mut steps = Vec::new();
    let paired = rank < 2 * pairs;
    if paired {
        steps.push(step(vec![recv(rank - 1, Combine::TheirsFirst)]));
    }
    // Positions among the ranks that take part, in ascending order of ranks, so that operands keep that order.
    let place = if paired { rank / 2 } else { rank - pairs };
    let rank_at = |place: usize| if place < pairs { 2 * place + 1 } else { place + pairs };
    for k in 0..doubling.ilog2() {
        let partner = rank_at(place ^ (1 << k));
        let combine = if partner < rank { Combine::TheirsFirst } else { Combine::MineFirst };
        steps.push(step(vec![send(partner), recv(partner, combine)]));
    }
    if let Some(last) = steps.last_mut() {
        last.finished = 0..len;
    }
    if paired {
        steps.push(step(vec![send(rank - 1)]));
    }
    Schedule { steps }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{check_all_reduce, run, schedules};

    #[test]
    fn sums_on_every_rank_in_few_steps() {
        for world_size in 1..=17usize {
            for len in [0, 1, 5] {
                let all = schedules(world_size, |rank| schedule(rank, world_size, len));
                check_all_reduce(&all, len);
                let longest = all.iter().map(|schedule| schedule.steps.len()).max();
                let extra = if world_size.is_power_of_two() { 0 } else { 2 };
                assert_eq!(longest, Some(world_size.ilog2() as usize + extra));
            }
        }
        check_all_reduce(&schedules(1000, |rank| schedule(rank, 1000, 3)), 3);
    }

    #[test]
    fn operands_keep_the_order_of_ranks() {
        for world_size in 1..=17 {
            let all = schedules(world_size, |rank| schedule(rank, world_size, 1));
            for buffer in run(&all, 1) {
                assert_eq!(buffer[0].order(), (0..world_size).collect::<Vec<_>>());
            }
        }
    }
}
