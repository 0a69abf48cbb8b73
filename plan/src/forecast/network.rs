//! Network model: links within and between nodes.

use comm::Topology;
use serde::{Deserialize, Serialize};

/// Link from one rank to another, in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Seconds from sending the first byte until it arrives.
    pub latency: f64,
    /// Seconds per byte (inverse bandwidth).
    pub s_per_byte: f64,
}

impl Link {
    /// NVLink 4 through a switch: 450 GB/s in each direction.
    const NVLINK: Self = Self { latency: 3e-6, s_per_byte: 1.0 / 450e9 };
    /// InfiniBand NDR, one port per rank: 400 Gbit/s.
    const INFINIBAND: Self = Self { latency: 5e-6, s_per_byte: 1.0 / 50e9 };
    /// Ethernet of 25 Gbit/s, one port per rank, TCP.
    const ETHERNET_25G: Self = Self { latency: 30e-6, s_per_byte: 1.0 / 3.125e9 };

    /// Returns the seconds of a message.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency + self.s_per_byte * bytes
    }
}

/// Network of nodes with equal numbers of neighbouring ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// Name, for display.
    pub name: String,
    /// Link between ranks of one node.
    pub inside: Link,
    /// Link between nodes.
    pub between: Link,
    /// Ranks per node.
    pub per_node: usize,
    /// Seconds that a rank takes to reduce or copy a byte.
    pub combine_s_per_byte: f64,
    /// Whether communication overlaps with computation. It does not where the CPU moves the bytes itself and has no
    /// spare core.
    pub overlaps: bool,
}

impl Network {
    /// Seconds to reduce a byte in an accelerator's memory: two reads and a write at about 3 TB/s.
    const ACCELERATOR: f64 = 1e-12;

    /// Nodes of 8, NVLink within and InfiniBand between them.
    pub fn nvlink() -> Self {
        let name = "NVLink in nodes of 8, InfiniBand 400 Gbit/s between".into();
        Self::accelerators(name, Link::NVLINK, Link::INFINIBAND, 8)
    }

    /// One rank per node, InfiniBand between them.
    pub fn infiniband() -> Self {
        let name = "InfiniBand 400 Gbit/s between all ranks".into();
        Self::accelerators(name, Link::INFINIBAND, Link::INFINIBAND, 1)
    }

    /// One rank per node, 25 Gbit/s Ethernet between them.
    pub fn ethernet_25g() -> Self {
        let name = "Ethernet 25 Gbit/s between all ranks".into();
        Self::accelerators(name, Link::ETHERNET_25G, Link::ETHERNET_25G, 1)
    }

    fn accelerators(name: String, inside: Link, between: Link, per_node: usize) -> Self {
        Self { name, inside, between, per_node, combine_s_per_byte: Self::ACCELERATOR, overlaps: true }
    }

    /// All ranks on one node.
    pub fn one_node(name: &str, link: Link, combine_s_per_byte: f64, overlaps: bool) -> Self {
        Self {
            name: name.into(),
            inside: link,
            between: link,
            per_node: usize::MAX,
            combine_s_per_byte,
            overlaps,
        }
    }

    /// Returns the link between two ranks.
    pub fn link(&self, one: usize, other: usize) -> Link {
        if self.node(one) == self.node(other) { self.inside } else { self.between }
    }

    /// Returns the nodes of some of the ranks.
    pub fn topology(&self, ranks: &[usize]) -> Topology {
        Topology::of(&ranks.iter().map(|rank| self.node(*rank)).collect::<Vec<_>>())
    }

    fn node(&self, rank: usize) -> usize {
        rank / self.per_node.max(1)
    }
}
