//! Hierarchical reduce-scatter, for hosts with several ranks each: the ranks of a host sum the parts of another host's
//! ranks, one for each, and send these sums around the ring of hosts to their ranks. Each host adds its own sum.

use std::ops::Range;

use crate::Topology;
use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};

/// Works on the input, then the output, then scratch space for sums, see [`room`]. There are two or more hosts, all
/// with the same number of ranks, two or more ([`Topology::is_regular`]).
///
/// # Cost
/// With H hosts of L ranks each: H(L-1) + 1 steps; each rank sends (P-1)/P of the input, of which (H-1)/P to another host, see
/// [`super::hierarchical_all_gather`].
///
/// # Source
/// The first phase of the 2D-torus all-reduce (Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a
/// Flash", 2018), over both dimensions.
pub(crate) fn schedule(rank: usize, topology: &Topology, parts: &Parts) -> Schedule {
    let own = Builder { rank, topology, parts, longest: parts.longest() };
    let count = topology.hosts().len();
    // A step between hosts needs this host's sums for that stage and the one before.
    let mut steps = own.sum_within_host(0).steps;
    steps.append(&mut own.sum_within_host(1).steps);
    for s in 0..count - 1 {
        let within = if s + 2 < count { own.sum_within_host(s + 2) } else { Schedule::default() };
        steps.append(&mut within.beside(own.send_between_hosts(s)).steps);
    }
    Schedule { steps }
}

/// Returns the number of elements of the buffer beyond input and output.
pub(crate) fn room(topology: &Topology, parts: &Parts) -> usize {
    let (hosts, ranks) = (topology.hosts().len(), topology.world_size() / topology.hosts().len());
    (places_within(ranks) + hosts.min(3) + (hosts - 2).min(2)) * parts.longest()
}

/// Returns the number of scratch ranges for partial sums within a host: two, of which one is being sent, if there are
/// that many steps.
fn places_within(ranks: usize) -> usize {
    ranks.saturating_sub(2).min(2)
}

struct Builder<'a> {
    rank: usize,
    topology: &'a Topology,
    parts: &'a Parts,
    longest: usize,
}

impl Builder<'_> {
    /// Returns the host whose parts are summed in stage `s`; this rank's own host is last.
    fn row(&self, s: usize) -> usize {
        let count = self.topology.hosts().len();
        (self.topology.place(self.rank).0 + 2 * count - 1 - s) % count
    }

    fn ranks(&self) -> usize {
        self.topology.world_size() / self.topology.hosts().len()
    }

    fn place(&self, number: usize, len: usize) -> Range<usize> {
        let start = self.parts.len() + self.parts.of(self.rank).len() + number * self.longest;
        start..start + len
    }

    /// Returns the range of this host's sum of stage `s`. It is overwritten in stage `s + 3`.
    fn host_sum(&self, s: usize, len: usize) -> Range<usize> {
        self.place(places_within(self.ranks()) + s % 3, len)
    }

    /// Returns the range of the sum over this and all earlier hosts after stage `s`.
    fn sum(&self, s: usize, len: usize) -> Range<usize> {
        let hosts = self.topology.hosts().len();
        match s {
            0 => self.host_sum(0, len),
            _ if s + 1 == hosts => self.parts.len()..self.parts.len() + len,
            _ => self.place(places_within(self.ranks()) + hosts.min(3) + (s - 1) % 2, len),
        }
    }

    /// Sums a host's parts over the ranks of this host, by a ring.
    fn sum_within_host(&self, s: usize) -> Schedule {
        let (hosts, (host, index)) = (self.topology.hosts(), self.topology.place(self.rank));
        let (local, row, ranks) = (&hosts[host], &hosts[self.row(s)], self.ranks());
        let of = |index: usize| self.parts.of(row[index % ranks]);
        let step = |k: usize| {
            // `2 * ranks` keeps the differences positive.
            let send = index + 2 * ranks - 1 - k;
            let (sent, mine) = (of(send), of(send - 1));
            let range = match k + 2 == ranks {
                true => self.host_sum(s, mine.len()),
                false => self.place(k % 2, mine.len()),
            };
            let sent = if k == 0 { sent } else { self.place((k - 1) % 2, sent.len()) };
            let (next, previous) = (local[(index + 1) % ranks], local[(index + ranks - 1) % ranks]);
            let fold =
                Transfer::Fold { from: previous, range, mine: mine.start, combine: Combine::TheirsFirst };
            ScheduleStep { transfers: vec![Transfer::Send { to: next, range: sent }, fold], finished: 0..0 }
        };
        Schedule { steps: (0..ranks - 1).map(step).collect() }
    }

    /// Sends the sum of stage `s` to the next host, and adds this host's own sum to the received one of the next stage.
    fn send_between_hosts(&self, s: usize) -> Schedule {
        let (hosts, (host, index)) = (self.topology.hosts(), self.topology.place(self.rank));
        let len = |s: usize| self.parts.of(hosts[self.row(s)][index]).len();
        let range = self.sum(s + 1, len(s + 1));
        let finished = if s + 2 == hosts.len() { range.clone() } else { 0..0 };
        let to = hosts[(host + 1) % hosts.len()][index];
        let from = hosts[(host + hosts.len() - 1) % hosts.len()][index];
        let mine = self.host_sum(s + 1, 0).start;
        let transfers = vec![
            Transfer::Send { to, range: self.sum(s, len(s)) },
            Transfer::Fold { from, range, mine, combine: Combine::TheirsFirst },
        ];
        Schedule { steps: vec![ScheduleStep { transfers, finished }] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{regular, run_uneven, schedules, sent_between};
    use proptest::prelude::*;

    fn check(topology: &Topology, parts: &Parts) -> Vec<Schedule> {
        let all = schedules(topology.world_size(), |rank| schedule(rank, topology, parts));
        let len = |rank| parts.len() + parts.of(rank).len() + room(topology, parts);
        for (rank, buffer) in run_uneven(&all, len).iter().enumerate() {
            let own = parts.of(rank).len();
            for element in &buffer[parts.len()..][..own] {
                assert_eq!(element.sorted(), (0..parts.count()).collect::<Vec<_>>());
            }
            assert!((0..parts.len()).all(|index| buffer[index].origin() == Some((rank, index))));
            let finished: usize = all[rank].steps.iter().map(|step| step.finished.len()).sum();
            assert_eq!(finished, own);
        }
        // No step writes to elements that it sends.
        for step in all.iter().flat_map(|schedule| &schedule.steps) {
            for transfer in &step.transfers {
                assert!(!matches!(transfer, Transfer::Fold { range, .. } if step.overlaps(range)));
            }
        }
        all
    }

    proptest! {
        #[test]
        fn each_rank_ends_with_the_sum_of_its_part(
            (hosts, ranks, topology, counts) in regular(2..6),
        ) {
            check(&topology, &Parts::uneven(&counts));
            let all = check(&topology, &Parts::even(6 * hosts * ranks, hosts * ranks));
            for schedule in &all {
                prop_assert_eq!(schedule.elements_sent(), 6 * (hosts * ranks - 1));
                prop_assert_eq!(schedule.steps.len(), hosts * (ranks - 1) + 1);
            }
            prop_assert_eq!(sent_between(&topology, &all), vec![6 * ranks * (hosts - 1); hosts]);
        }
    }

    #[test]
    fn a_thousand_ranks() {
        let topology = Topology::of(&(0..1000).map(|rank| rank / 8).collect::<Vec<_>>());
        check(&topology, &Parts::even(1000, 1000));
    }
}
