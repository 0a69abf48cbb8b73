//! Hierarchical all-reduce, for hosts with several ranks each: within each host every rank sums its part of the buffer,
//! then the ranks with the same part sum it over the hosts, then the ranks of each host gather the parts. Few bytes are
//! sent between hosts, where it is slow, and all ranks of a host send them in parallel.

use crate::Topology;
use crate::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer, part};

use super::{ring_all_gather, ring_all_reduce};

/// Minimum bytes of a segment, and maximum number of segments. More segments would overlap more of the work within
/// hosts with that between them (four overlap three quarters), but each costs the network's latency.
const SEGMENT_BYTES: usize = 1 << 20;
const SEGMENTS: usize = 4;

/// Returns the number of segments of a buffer: one can be sent between hosts while the next is summed within them.
pub(crate) fn segments(len: usize, element_bytes: usize) -> usize {
    (len.saturating_mul(element_bytes) / SEGMENT_BYTES).clamp(1, SEGMENTS)
}

/// For a buffer of `len` elements in `segments` segments, 1 or more. A segment is divided into as many parts as the
/// host with the fewest ranks has; on hosts with more ranks, some have no part.
///
/// # Cost
/// With H hosts of L ranks each: the ranks of a host together send 2(H-1)/H of the buffer to another host, in 2(H-1)
/// steps, so that each byte is sent once each way between two hosts. Within its host, each rank sends 2(L-1)/L of the
/// buffer in 2(L-1) steps. (A flat ring sends 2(P-1)/P from each host to the next, in 2(P-1) steps.) With segments, the
/// number of bytes is the same; steps of consecutive segments run at the same time.
///
/// # Source
/// Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018: the 2D-torus all-reduce.
pub(crate) fn schedule(rank: usize, topology: &Topology, len: usize, segments: usize) -> Schedule {
    let phases = |index: usize| {
        let place = part(len, segments, index);
        phases(rank, topology, place.len()).map(|phase| phase.shifted(place.start))
    };
    let mut waiting: Vec<[Schedule; 3]> = (0..segments).map(phases).collect();
    let mut take = |segment: Option<usize>, phase: usize| {
        let phases = segment.and_then(|segment| waiting.get_mut(segment));
        phases.map(|phases| std::mem::take(&mut phases[phase])).unwrap_or_default()
    };
    let stages = (0..segments + 2).map(|stage| {
        let within = take(Some(stage), 0).then(take(stage.checked_sub(2), 2));
        within.beside(take(stage.checked_sub(1), 1))
    });
    Schedule { steps: stages.flat_map(|stage| stage.steps).collect() }
}

/// Returns three phases: within the host, between hosts, within the host.
fn phases(rank: usize, topology: &Topology, len: usize) -> [Schedule; 3] {
    let (hosts, (host, index)) = (topology.hosts(), topology.place(rank));
    let local = &hosts[host];
    let count = hosts.iter().map(Vec::len).min().unwrap_or(1);
    let lengths: Vec<usize> =
        (0..local.len()).map(|index| if index < count { part(len, count, index).len() } else { 0 }).collect();
    let parts = Parts::uneven(&lengths);
    let own = parts.of(index);
    let between = match index < count {
        true => ring_all_reduce::schedule(host, hosts.len(), own.len()),
        false => Schedule::default(),
    };
    [
        ring_reduce_scatter_in_place(index, &parts).among(|place| local[place]),
        between.shifted(own.start).among(|host| hosts[host][index]),
        ring_all_gather::schedule(index, &parts).among(|place| local[place]),
    ]
}

/// Each part is sent once around the ring, being summed, and ends at its own rank. Elsewhere its elements are
/// overwritten.
fn ring_reduce_scatter_in_place(rank: usize, parts: &Parts) -> Schedule {
    let world_size = parts.count();
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let step = |s: usize| {
        // `2 * world_size` keeps the differences positive; `Parts::of` takes them modulo the number of parts.
        let send = rank + 2 * world_size - 1 - s;
        ScheduleStep {
            finished: 0..0,
            transfers: vec![
                Transfer::Send { to: next, range: parts.of(send) },
                Transfer::Recv { from: previous, range: parts.of(send - 1), combine: Combine::TheirsFirst },
            ],
        }
    };
    Schedule { steps: (0..world_size - 1).map(step).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::simulate::{check_all_reduce, schedules, sent_between};
    use proptest::prelude::*;

    fn all(topology: &Topology, len: usize, segments: usize) -> Vec<Schedule> {
        schedules(topology.world_size(), |rank| schedule(rank, topology, len, segments))
    }

    proptest! {
        #[test]
        fn sums_on_every_rank_wherever_they_are(
            hosts in prop::collection::vec(0usize..4, 1..12),
            len in 0usize..80,
            segments in 1usize..6,
        ) {
            check_all_reduce(&all(&Topology::of(&hosts), len, segments), len);
        }

        #[test]
        fn each_host_sends_the_least_there_is(
            hosts in prop::collection::vec(0usize..4, 1..12),
            segments in 1usize..4,
        ) {
            let topology = Topology::of(&hosts);
            let (count, least) =
                (topology.hosts().len(), topology.hosts().iter().map(Vec::len).min().unwrap());
            let len = 5 * count * least * segments;
            let sent = sent_between(&topology, &all(&topology, len, segments));
            prop_assert_eq!(sent, vec![2 * (count - 1) * len / count; count]);
        }
    }

    #[test]
    fn it_costs_what_it_says() {
        for (hosts, ranks) in [(2, 2), (2, 4), (3, 2), (4, 8)] {
            // Neighbours are on one host, or each on the next one.
            for near in [true, false] {
                let host = |rank: usize| if near { rank / ranks } else { rank % hosts };
                let topology = Topology::of(&(0..hosts * ranks).map(host).collect::<Vec<_>>());
                let len = 6 * hosts * ranks;
                for schedule in all(&topology, len, 1) {
                    assert_eq!(schedule.steps.len(), 2 * (ranks - 1) + 2 * (hosts - 1));
                    let (within, across) =
                        (2 * (ranks - 1) * len / ranks, 2 * (hosts - 1) * len / hosts / ranks);
                    assert_eq!(schedule.elements_sent(), within + across);
                }
            }
        }
    }

    #[test]
    fn segments_overlap() {
        let topology = Topology::of(&[0, 0, 1, 1]);
        let schedule = schedule(0, &topology, 400, 4);
        // Each segment has two steps within hosts and two between them, overlapped with other segments; the first and
        // the last step run alone.
        assert_eq!(schedule.steps.len(), 1 + 2 + 2 + 2 + 2 + 1);
        let both = |step: &ScheduleStep| {
            step.transfers.iter().filter_map(Transfer::peer).any(|(peer, _)| peer == 1)
                && step.transfers.iter().filter_map(Transfer::peer).any(|(peer, _)| peer == 2)
        };
        assert_eq!(schedule.steps.iter().filter(|step| both(step)).count(), 6);
    }

    #[test]
    fn buffers_are_cut_where_it_pays() {
        assert_eq!(
            [segments(0, 4), segments(1 << 17, 4), segments(1 << 19, 4), segments(1 << 30, 4)],
            [1, 1, 2, 4]
        );
    }

    #[test]
    fn a_thousand_ranks() {
        let topology = Topology::of(&(0..1000).map(|rank| rank / 8).collect::<Vec<_>>());
        check_all_reduce(&all(&topology, 2003, 2), 2003);
    }
}
