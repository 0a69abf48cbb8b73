//! Time of a collective within a group of ranks.

use std::collections::HashMap;

use comm::algorithm::schedule::{Combine, Parts, Schedule, ScheduleStep, Transfer};
use comm::{Topology, algorithm};

use super::{Network, event};

/// Bytes of an element: reductions are in f32.
const ELEMENT: usize = size_of::<f32>();

/// Largest group that is simulated rank by rank.
const SIMULATED: usize = 512;

/// Collective operation, by its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Sums a buffer over all ranks.
    AllReduce,
    /// Concatenates the parts of all ranks on each of them.
    AllGather,
    /// Sums a buffer over all ranks and leaves each rank with its part.
    ReduceScatter,
    /// Sends one rank's buffer to all.
    Broadcast,
    /// Sends a buffer to the next rank and receives one from the previous.
    SendRecv,
    /// Waits for all ranks.
    Barrier,
}

impl Collective {
    /// Returns the collective of a `comm-bench` row; `None` if there is no schedule for it here.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "all_reduce" => Self::AllReduce,
            "all_gather" => Self::AllGather,
            "reduce_scatter" => Self::ReduceScatter,
            "broadcast" => Self::Broadcast,
            "send_recv" => Self::SendRecv,
            "barrier" => Self::Barrier,
            _ => return None,
        })
    }

    /// Returns the schedule of a rank, as `comm` would run it. `bytes` is the size of the whole buffer, all parts
    /// together.
    pub fn schedule(self, rank: usize, topology: &Topology, bytes: usize) -> Schedule {
        let (len, ranks) = (bytes / ELEMENT, topology.world_size());
        let parts = Parts::even(len, ranks);
        match self {
            Self::AllReduce => algorithm::all_reduce(rank, topology, len, ELEMENT),
            Self::AllGather => {
                let copy = Transfer::Copy { range: parts.of(rank), to: parts.of(rank).start };
                let mut schedule = algorithm::all_gather(rank, topology, &parts);
                schedule.steps.insert(0, ScheduleStep { transfers: vec![copy], finished: 0..0 });
                schedule
            }
            Self::ReduceScatter => algorithm::reduce_scatter(rank, topology, &parts, ELEMENT).0,
            Self::Broadcast => algorithm::broadcast(rank, ranks, len, ELEMENT, 0),
            Self::SendRecv => {
                let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                let transfers = vec![
                    Transfer::Send { to, range: 0..len },
                    Transfer::Recv { from, range: 0..len, combine: Combine::Replace },
                ];
                Schedule { steps: vec![ScheduleStep { transfers, finished: 0..0 }] }
            }
            Self::Barrier => algorithm::barrier(rank, topology),
        }
    }
}

impl Collective {
    /// Whether the number of steps grows at most with the logarithm of the number of ranks, when there are many.
    fn is_tree(self, bytes: usize) -> bool {
        match self {
            Self::AllReduce => bytes <= algorithm::LATENCY_BYTES,
            Self::Broadcast | Self::Barrier | Self::SendRecv => true,
            Self::AllGather | Self::ReduceScatter => false,
        }
    }
}

/// Group of equally spaced ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group {
    /// Number of ranks.
    pub ranks: usize,
    /// Distance from one rank to the next.
    pub stride: usize,
}

/// Times of collectives on a network, with a cache of those computed before.
#[derive(Debug)]
pub struct Collectives<'a> {
    network: &'a Network,
    /// Largest group that is simulated rank by rank.
    simulated: usize,
    known: HashMap<(Collective, Group, usize), f64>,
}

impl<'a> Collectives<'a> {
    /// Creates an empty cache for a network.
    pub fn new(network: &'a Network) -> Self {
        Self::up_to(network, SIMULATED)
    }

    /// As [`new`](Self::new), but groups of more than `simulated` ranks, at least 4, are extrapolated from smaller
    /// ones: for many different groups and sizes.
    pub(crate) fn up_to(network: &'a Network, simulated: usize) -> Self {
        Self { network, simulated: simulated.max(4), known: HashMap::new() }
    }

    /// Returns the network.
    pub fn network(&self) -> &'a Network {
        self.network
    }

    /// Returns the seconds that a collective takes.
    pub fn seconds(&mut self, collective: Collective, group: Group, bytes: usize) -> f64 {
        if group.ranks < 2 {
            return 0.0;
        }
        if group.ranks > self.simulated {
            return self.extrapolate(collective, group, bytes);
        }
        *self.known.entry((collective, group, bytes)).or_insert_with(|| {
            let members: Vec<usize> = (0..group.ranks).map(|rank| rank * group.stride).collect();
            let topology = self.network.topology(&members);
            let schedules: Vec<Schedule> =
                (0..group.ranks).map(|rank| collective.schedule(rank, &topology, bytes)).collect();
            event::seconds(&schedules, ELEMENT, self.network, &members)
        })
    }

    /// Extrapolates to groups that are too large to simulate, from the largest simulated group and one of half its
    /// size. In a tree, the number of steps grows with the logarithm of the ranks. In a ring, there is a step for each
    /// other rank, with the same latency and a smaller share of the bytes.
    fn extrapolate(&mut self, collective: Collective, group: Group, bytes: usize) -> f64 {
        let largest = self.simulated;
        let mut at = |ranks: usize| self.seconds(collective, Group { ranks, ..group }, bytes);
        let (most, half) = (at(largest), at(largest / 2));
        let (ranks, simulated) = (group.ranks as f64, largest as f64);
        if collective.is_tree(bytes) {
            return most + (ranks / simulated).log2() * (most - half);
        }
        let (most, half) = (most / (simulated - 1.0), half / (simulated / 2.0 - 1.0));
        (ranks - 1.0) * (most + (1.0 - simulated / ranks) * (most - half))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::Link;

    /// One node, with this link between ranks and this time to reduce a byte.
    fn network(latency: f64, s_per_byte: f64, combine: f64) -> Network {
        Network::one_node("test", Link { latency, s_per_byte }, combine, false)
    }

    fn seconds(network: &Network, collective: Collective, ranks: usize, bytes: usize) -> f64 {
        Collectives::new(network).seconds(collective, Group { ranks, stride: 1 }, bytes)
    }

    #[test]
    fn times_are_those_of_the_formulas() {
        for ranks in [2, 3, 4, 8, 100] {
            let (p, bytes) = (ranks as f64, 400_000 * ranks);
            let (steps, part) = (2.0 * (p - 1.0), (bytes / ranks) as f64);
            // Segments add steps, but no bytes.
            let ring = seconds(&network(0.0, 1.0, 0.0), Collective::AllReduce, ranks, bytes);
            assert!((ring / (steps * part) - 1.0).abs() < 1e-9, "{ranks}: {ring}");
            let gather = seconds(&network(1.0, 1.0, 0.0), Collective::AllGather, ranks, bytes);
            assert!((gather - (p - 1.0) * (1.0 + part)).abs() < 1e-6 * gather, "{ranks}: {gather}");
            let scatter = seconds(&network(0.0, 0.0, 1.0), Collective::ReduceScatter, ranks, bytes);
            assert!((scatter - (p - 1.0) * part).abs() < 1e-6 * scatter, "{ranks}: {scatter}");
            let few = seconds(&network(1.0, 0.0, 0.0), Collective::AllReduce, ranks, 64);
            assert!(few >= (p.log2()).floor() && few <= p.log2().ceil() + 2.0, "{ranks}: {few}");
            assert_eq!(seconds(&network(1.0, 0.0, 0.0), Collective::Barrier, ranks, 0), p.log2().ceil());
        }
        assert_eq!(seconds(&network(1.0, 1.0, 1.0), Collective::AllReduce, 1, 400), 0.0);
        assert_eq!(seconds(&network(1.0, 1.0, 1.0), Collective::SendRecv, 2, 400), 401.0);
    }

    #[test]
    fn more_ranks_than_are_simulated_take_what_the_formulas_say() {
        let network = network(1e-5, 1e-9, 0.0);
        for ranks in [SIMULATED + 1, 1000, 4096] {
            let (p, bytes) = (ranks as f64, 1 << 26);
            let (steps, part) = (p - 1.0, bytes as f64 * 1e-9 / p);
            let gather = seconds(&network, Collective::AllGather, ranks, bytes);
            assert!((gather / (steps * (1e-5 + part)) - 1.0).abs() < 1e-3, "{ranks}: {gather}");
            let reduce = seconds(&network, Collective::AllReduce, ranks, bytes);
            assert!((reduce / (2.0 * steps * (1e-5 + part)) - 1.0).abs() < 1e-3, "{ranks}: {reduce}");
            let few = seconds(&network, Collective::AllReduce, ranks, 4000) / (1e-5 + 4e-6);
            assert!(few >= p.log2() - 0.01 && few <= p.log2() + 2.0, "{ranks}: {few}");
        }
    }

    #[test]
    fn ranks_of_a_node_share_the_way_to_others() {
        let nodes =
            Network { per_node: 4, inside: Link { latency: 0.0, s_per_byte: 0.1 }, ..network(0.0, 1.0, 0.0) };
        // Each rank's 1000 bytes pass between the nodes once; 6 transfers of 100 s each remain within the node.
        assert_eq!(seconds(&nodes, Collective::AllGather, 8, 8000), 1000.0 + 600.0);
        assert!((seconds(&nodes, Collective::AllGather, 4, 8000) - 600.0).abs() < 1e-6);
        let apart =
            Collectives::new(&nodes).seconds(Collective::AllGather, Group { ranks: 2, stride: 4 }, 8000);
        assert_eq!(apart, 4000.0);
    }
}
