//! Ten thousand ranks run collectives, over a model of a network: what it takes in messages, bytes and time, by the schedules that run.
//! Bytes are those of the elements.

use std::collections::BTreeMap;
use std::time::Duration;

use super::simulate::schedules;
use super::{all_gather, all_reduce, barrier, broadcast, reduce_scatter};
use crate::Topology;
use crate::algorithm::schedule::{Parts, Schedule, Transfer};
use crate::base::network_model::{LinkModel, Network};

const RANKS: usize = 10_000;
const RANKS_PER_HOST: usize = 8;
/// 10 Gbit/s, between two racks.
const LINK: LinkModel = LinkModel { latency: Duration::from_micros(200), bytes_per_second: 1.25e9 };
/// Bytes of an element.
const SIZE: usize = 4;

/// What an operation has cost all ranks together.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Costs {
    messages: usize,
    bytes: usize,
    time: Duration,
}

/// A rank that runs its schedule.
struct Rank<'a> {
    schedule: &'a Schedule,
    step: usize,
    /// By sender: number of messages that have come and are not received yet.
    came: BTreeMap<usize, usize>,
}

impl Rank<'_> {
    /// Takes the messages of the step, if all have come; returns whether it did, and goes on to the next step.
    fn receive(&mut self) -> bool {
        let Some(step) = self.schedule.steps.get(self.step) else { return false };
        let senders = step.transfers.iter().filter_map(Transfer::peer).filter(|(_, sends)| !sends);
        let mut awaited = BTreeMap::new();
        senders.for_each(|(from, _)| *awaited.entry(from).or_default() += 1);
        if awaited.iter().any(|(from, count)| self.came.get(from).copied().unwrap_or(0) < *count) {
            return false;
        }
        awaited.into_iter().for_each(|(from, count)| *self.came.entry(from).or_default() -= count);
        self.step += 1;
        true
    }
}

/// Runs the schedules of all ranks, as the executor does: a rank sends all messages of a step, and goes on to the next one when it
/// has received all.
fn run(all: &[Schedule]) -> Costs {
    let mut network = Network::new(all.len(), LINK);
    let rank = |schedule| Rank { schedule, step: 0, came: BTreeMap::new() };
    let mut ranks: Vec<Rank<'_>> = all.iter().map(rank).collect();
    ranks.iter_mut().enumerate().for_each(|(rank, state)| advance(&mut network, state, rank));
    while let Some((to, from)) = network.next() {
        *ranks[to].came.entry(from).or_default() += 1;
        if ranks[to].receive() {
            advance(&mut network, &mut ranks[to], to);
        }
    }
    assert!(ranks.iter().all(|rank| rank.step == rank.schedule.steps.len()), "a rank is stuck");
    assert!(ranks.iter().all(|rank| rank.came.values().all(|count| *count == 0)), "a message is left");
    let [messages, bytes] = network.sent();
    Costs { messages, bytes, time: network.now() }
}

/// Sends the messages of a rank's step, and of those after it, up to one for which messages have yet to come.
fn advance(network: &mut Network<usize>, state: &mut Rank<'_>, rank: usize) {
    while let Some(step) = state.schedule.steps.get(state.step) {
        for transfer in &step.transfers {
            if let Transfer::Send { to, range } = transfer {
                network.send(rank, *to, range.len() * SIZE, rank);
            }
        }
        if !state.receive() {
            break;
        }
    }
}

/// Runs schedules that are the same for all ranks but for the numbers of the ranks: all ranks take the same time, and one stands for
/// all. So the steps of ten thousand ranks around a ring need not be made for each.
fn run_alike(world_size: usize, schedule: impl Fn(usize) -> Schedule) -> Costs {
    let first = schedule(0);
    for rank in (0..world_size).step_by(world_size.div_ceil(7)) {
        let own = schedule(rank);
        assert_eq!(shape(&own), shape(&first), "rank {rank}");
        let next = own.peers().into_iter().find(|peer| messages(&own, *peer, true).next().is_some());
        let next = next.expect("it sends");
        assert!(messages(&own, next, true).eq(messages(&schedule(next), rank, false)), "{rank} to {next}");
    }
    let Costs { messages, bytes, time } = run(&[first.among(|_| 0)]);
    Costs { messages: messages * world_size, bytes: bytes * world_size, time }
}

/// Returns step, length and direction of all messages.
fn shape(schedule: &Schedule) -> Vec<(usize, usize, bool)> {
    let peers = schedule.peers();
    let of = |peer: &usize| {
        [true, false].map(|sends| messages(schedule, *peer, sends).map(move |m| (m.0, m.1, sends)))
    };
    let mut shape: Vec<_> = peers.iter().flat_map(of).flatten().collect();
    shape.sort_unstable();
    shape
}

/// Returns step and length of the messages to a peer, or from it.
fn messages(schedule: &Schedule, peer: usize, sends: bool) -> impl Iterator<Item = (usize, usize)> {
    schedule.steps.iter().enumerate().flat_map(move |(index, step)| {
        let of_peer = step.transfers.iter().filter(move |transfer| transfer.peer() == Some((peer, sends)));
        of_peer.filter_map(move |transfer| match transfer {
            Transfer::Send { range, .. } | Transfer::Recv { range, .. } | Transfer::Fold { range, .. } => {
                Some((index, range.len()))
            }
            Transfer::Copy { .. } | Transfer::Reduce { .. } => None,
        })
    })
}

fn topology(ranks: usize, ranks_per_host: usize) -> Topology {
    Topology::of(&(0..ranks).map(|rank| rank / ranks_per_host).collect::<Vec<_>>())
}

/// Asserts that an operation takes that many messages, of `len` elements each, in that many latencies, and little more time.
fn check(name: &str, costs: Costs, (messages, len): (usize, usize), latencies: u32) {
    println!("{name} of {RANKS}: {costs:?}");
    assert_eq!((costs.messages, costs.bytes), (messages, messages * len * SIZE), "{name}");
    let least = LINK.latency * latencies;
    assert!(
        costs.time >= least && costs.time < least + least / 10,
        "{name}: {:?}, at least {least:?}",
        costs.time
    );
}

#[test]
fn ten_thousand_reduce_broadcast_and_wait_in_few_steps() {
    let topology = topology(RANKS, RANKS_PER_HOST);
    // 8192 take part, 13 steps away from the farthest one; the others give their elements to one of those, and get the sum.
    let pairs = RANKS - 8192;
    let all = schedules(RANKS, |rank| all_reduce(rank, &topology, 256, SIZE));
    check("all-reduce", run(&all), (13 * 8192 + 2 * pairs, 256), 14);
    let all = schedules(RANKS, |rank| broadcast(rank, RANKS, 256, SIZE, 4321));
    // The last ranks to hear are reached over as many others as their distance has bits set, 12 of 14 at most, each of which waits
    // for its turn.
    check("broadcast", run(&all), (RANKS - 1, 256), 12);
    let all = schedules(RANKS, |rank| barrier(rank, &topology));
    let costs = run(&all);
    check("barrier", costs, (14 * RANKS, costs.bytes / costs.messages / SIZE), 14);
}

#[test]
fn ten_thousand_gather_and_scatter_around_rings() {
    let parts = Parts::even(RANKS, RANKS);
    // Around one ring, or on each host of several ranks around rings of hosts and within the host.
    for (ranks_per_host, latencies) in [(1, RANKS - 1), (RANKS_PER_HOST, RANKS - RANKS / RANKS_PER_HOST)] {
        let topology = topology(RANKS, ranks_per_host);
        let gather = run_alike(RANKS, |rank| all_gather(rank, &topology, &parts));
        check("all-gather", gather, ((RANKS - 1) * RANKS, 1), latencies as u32);
        let scatter = run_alike(RANKS, |rank| reduce_scatter(rank, &topology, &parts, SIZE).0);
        check("reduce-scatter", scatter, ((RANKS - 1) * RANKS, 1), latencies as u32);
    }
}

#[test]
fn where_ranks_are_alike_one_stands_for_all() {
    for (ranks, ranks_per_host) in [(2, 1), (9, 1), (12, 3), (40, 8)] {
        let (topology, parts) = (topology(ranks, ranks_per_host), Parts::even(3 * ranks, ranks));
        let gather = |rank| all_gather(rank, &topology, &parts);
        let scatter = |rank| reduce_scatter(rank, &topology, &parts, SIZE).0;
        assert_alike(run(&schedules(ranks, gather)), run_alike(ranks, gather));
        assert_alike(run(&schedules(ranks, scatter)), run_alike(ranks, scatter));
    }
}

/// Asserts that two runs have cost the same, but for the order in which messages came in over a link at the same time.
fn assert_alike(one: Costs, other: Costs) {
    assert_eq!((one.messages, one.bytes), (other.messages, other.bytes));
    assert!(one.time.abs_diff(other.time) < one.time / 1000, "{one:?}, {other:?}");
}
