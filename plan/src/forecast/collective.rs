//! How long a collective takes among some ranks.

use std::collections::HashMap;

use comm::schedule::{Combine, Parts, Schedule, Step, Transfer};
use comm::{Topology, algorithm};

use super::{Network, event};

/// Bytes of an element: sums are of f32.
const ELEMENT: usize = size_of::<f32>();

/// Ranks of a group that are simulated one by one.
const SIMULATED: usize = 512;

/// An operation of all ranks of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Sums a buffer over all ranks.
    AllReduce,
    /// Puts the parts of all ranks together on each of them.
    AllGather,
    /// Sums a buffer over all ranks and gives each its part.
    ReduceScatter,
    /// Sends one rank's buffer to all.
    Broadcast,
    /// Sends a buffer to the next rank and receives one from the one before.
    SendRecv,
    /// Waits for all ranks.
    Barrier,
}

impl Collective {
    /// That of a row of `comm-bench`; none where there is no schedule for it here.
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

    /// What a rank does, for a buffer of so many bytes, of all parts together: what `comm` would do.
    pub fn schedule(self, rank: usize, topology: &Topology, bytes: usize) -> Schedule {
        let (len, ranks) = (bytes / ELEMENT, topology.world_size());
        let parts = Parts::even(len, ranks);
        match self {
            Self::AllReduce => algorithm::all_reduce(rank, topology, len, ELEMENT),
            Self::AllGather => {
                let copy = Transfer::Copy { range: parts.of(rank), to: parts.of(rank).start };
                let mut schedule = algorithm::all_gather(rank, topology, &parts);
                schedule.steps.insert(0, Step { transfers: vec![copy], finished: 0..0 });
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
                Schedule { steps: vec![Step { transfers, finished: 0..0 }] }
            }
            Self::Barrier => algorithm::dissemination_barrier::schedule(rank, ranks),
        }
    }
}

impl Collective {
    /// Whether its steps are as many as the logarithm of the ranks, where there are many ranks.
    fn is_tree(self, bytes: usize) -> bool {
        match self {
            Self::AllReduce => bytes <= algorithm::LATENCY_BYTES,
            Self::Broadcast | Self::Barrier | Self::SendRecv => true,
            Self::AllGather | Self::ReduceScatter => false,
        }
    }
}

/// Ranks at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group {
    /// How many.
    pub ranks: usize,
    /// From one to the next.
    pub stride: usize,
}

/// Collectives over one network; what was asked before is known.
#[derive(Debug)]
pub struct Collectives<'a> {
    network: &'a Network,
    /// Ranks of a group that are simulated one by one.
    simulated: usize,
    known: HashMap<(Collective, Group, usize), f64>,
}

impl<'a> Collectives<'a> {
    /// Over a network.
    pub fn new(network: &'a Network) -> Self {
        Self::up_to(network, SIMULATED)
    }

    /// The same with groups of more ranks than so many, 4 or more, reckoned from smaller ones: for many different groups and sizes.
    pub fn up_to(network: &'a Network, simulated: usize) -> Self {
        Self { network, simulated: simulated.max(4), known: HashMap::new() }
    }

    /// The network.
    pub fn network(&self) -> &'a Network {
        self.network
    }

    /// Seconds that a collective takes.
    pub fn seconds(&mut self, collective: Collective, group: Group, bytes: usize) -> f64 {
        if group.ranks < 2 {
            return 0.0;
        }
        if group.ranks > self.simulated {
            return self.beyond(collective, group, bytes);
        }
        *self.known.entry((collective, group, bytes)).or_insert_with(|| {
            let members: Vec<usize> = (0..group.ranks).map(|rank| rank * group.stride).collect();
            let topology = self.network.topology(&members);
            let schedules: Vec<Schedule> =
                (0..group.ranks).map(|rank| collective.schedule(rank, &topology, bytes)).collect();
            event::seconds(&schedules, ELEMENT, self.network, &members)
        })
    }

    /// Among more ranks than are worth simulating, by what it takes among those that are, and half as many: with steps that grow
    /// with the logarithm of the ranks in a tree; in a ring there is one for each other rank, which costs the same for latency and
    /// less for its share of the bytes.
    fn beyond(&mut self, collective: Collective, group: Group, bytes: usize) -> f64 {
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

    /// A link of 1 s latency and 1 s a byte, and reducing that takes no time.
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
            // Segments are more steps of as many bytes.
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
        // Each part of 1000 bytes goes to the other node once; 6 of 100 s each go on within it.
        assert_eq!(seconds(&nodes, Collective::AllGather, 8, 8000), 1000.0 + 600.0);
        assert!((seconds(&nodes, Collective::AllGather, 4, 8000) - 600.0).abs() < 1e-6);
        let apart =
            Collectives::new(&nodes).seconds(Collective::AllGather, Group { ranks: 2, stride: 4 }, 8000);
        assert_eq!(apart, 4000.0);
    }
}
