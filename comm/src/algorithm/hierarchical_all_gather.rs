//! Hierarchical all-gather, for hosts with several ranks each: the ranks with the same index on each host send their
//! parts around a ring of hosts, and the ranks of a host send each other the parts received.

use crate::Topology;
use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

use super::ring_all_gather;

/// Works on the output, whose `rank`-th part already holds this rank's input. Hosts have equally many ranks
/// ([`Topology::is_regular`]).
///
/// # Cost
/// P-1 or fewer steps; each rank sends (P-1)/P of the output, as in a ring. But with H hosts of L ranks each, the bytes
/// between hosts are spread over all ranks: each sends (H-1)/P of the output to another host, whatever the order of
/// ranks, while in a ring one rank of each host sends (P-1)/P, or all do if neighbours are on different hosts.
///
/// # Source
/// The last phase of the 2D-torus all-reduce (Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a
/// Flash", 2018), over both dimensions.
pub(crate) fn schedule(rank: usize, topology: &Topology, parts: &Parts) -> Schedule {
    let (hosts, (host, index)) = (topology.hosts(), topology.place(rank));
    let (local, count) = (&hosts[host], hosts.len());
    let of = |host: usize, index: usize| parts.of(hosts[host % count][index % local.len()]);
    let stage = |s: usize| {
        // The host whose parts were received last; `count` keeps the difference positive.
        let row = host + count - s;
        let within = ring_all_gather::schedule_of(index, local.len(), |index| of(row, index));
        let between = ScheduleStep {
            finished: 0..0,
            transfers: vec![
                Transfer::Send { to: hosts[(host + 1) % count][index], range: of(row, index) },
                Transfer::Recv {
                    from: hosts[(host + count - 1) % count][index],
                    range: of(row + count - 1, index),
                    combine: Combine::Replace,
                },
            ],
        };
        let between = Schedule { steps: if s + 1 < count { vec![between] } else { Vec::new() } };
        within.among(|place| local[place]).beside(between)
    };
    Schedule { steps: (0..count).flat_map(|s| stage(s).steps).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{regular, run, schedules, sent_between};
    use proptest::prelude::*;

    fn check(topology: &Topology, parts: &Parts) -> Vec<Schedule> {
        let all = schedules(topology.world_size(), |rank| schedule(rank, topology, parts));
        for buffer in run(&all, parts.len()) {
            for owner in 0..parts.count() {
                assert!(parts.of(owner).all(|index| buffer[index].origin() == Some((owner, index))));
            }
        }
        all
    }

    proptest! {
        #[test]
        fn every_rank_ends_with_every_part(
            (hosts, ranks, topology, counts) in regular(1..5),
        ) {
            check(&topology, &Parts::uneven(&counts));
            let all = check(&topology, &Parts::even(6 * hosts * ranks, hosts * ranks));
            prop_assert!(all.iter().all(|schedule| schedule.elements_sent() == 6 * (hosts * ranks - 1)));
            prop_assert!(all.iter().all(|schedule| schedule.steps.len() <= hosts * ranks));
            prop_assert_eq!(sent_between(&topology, &all), vec![6 * ranks * (hosts - 1); hosts]);
        }
    }

    #[test]
    fn a_thousand_ranks() {
        let topology = Topology::of(&(0..1000).map(|rank| rank / 8).collect::<Vec<_>>());
        check(&topology, &Parts::even(1000, 1000));
    }
}
