//! Collective algorithms, one a file. Each is a pure function from rank, world size and length to a [`Schedule`].

pub(crate) mod binomial_broadcast;
pub(crate) mod binomial_reduce;
pub(crate) mod chain_broadcast;
pub(crate) mod chain_reduce;
pub(crate) mod direct_all_gather;
pub(crate) mod direct_gather;
pub(crate) mod direct_scatter;
pub(crate) mod dissemination_barrier;
pub(crate) mod hierarchical_all_gather;
pub(crate) mod hierarchical_all_reduce;
pub(crate) mod hierarchical_reduce_scatter;
pub(crate) mod pairwise_all_reduce;
pub(crate) mod pairwise_all_to_all;
pub(crate) mod pairwise_reduce;
pub(crate) mod pairwise_reduce_scatter;
pub(crate) mod recursive_doubling;
pub(crate) mod ring_all_gather;
pub(crate) mod ring_all_reduce;
pub(crate) mod ring_reduce_scatter;
pub mod schedule;
pub(crate) mod segmented;
pub(crate) mod topology;

use crate::Topology;
use crate::algorithm::schedule::{Parts, Schedule};

/// Up to this many bytes, an all-reduce uses the algorithm with few steps; above, the one with few bytes. Measured with
/// `comm-bench` on 2 cores, the two take the same time at 48 KiB (2 ranks) and 96 KiB (4 ranks) through shared memory,
/// at 512 KiB and 192 KiB over TCP.
pub const LATENCY_BYTES: usize = 64 * 1024;

/// Returns the schedule of an all-reduce of `len` elements of `element_bytes` each. On one host a long buffer is
/// divided into segments, see `segmented`; between hosts each byte is sent once, see `hierarchical_all_reduce`.
pub fn all_reduce(rank: usize, topology: &Topology, len: usize, element_bytes: usize) -> Schedule {
    let world_size = topology.world_size();
    if len.saturating_mul(element_bytes) <= LATENCY_BYTES {
        recursive_doubling::schedule(rank, world_size, len)
    } else if topology.is_hierarchical() {
        let segments = hierarchical_all_reduce::segments(len, element_bytes);
        hierarchical_all_reduce::schedule(rank, topology, len, segments)
    } else {
        let segment = topology.segment_bytes() / element_bytes.max(1);
        segmented::schedule(len, segment, |len| ring_all_reduce::schedule(rank, world_size, len))
    }
}

/// Returns the schedule of an all-gather of these parts, on the output. With several ranks on each host, all ranks send
/// between hosts at the same time, see `hierarchical_all_gather`; a few ranks that share memory send to all others at once,
/// see `direct_all_gather`.
pub fn all_gather(rank: usize, topology: &Topology, parts: &Parts) -> Schedule {
    if topology.is_regular() {
        hierarchical_all_gather::schedule(rank, topology, parts)
    } else if is_direct(topology) {
        direct_all_gather::schedule(rank, parts)
    } else {
        ring_all_gather::schedule(rank, parts)
    }
}

/// Returns the schedule of a barrier, on a buffer of one element.
pub fn barrier(rank: usize, topology: &Topology) -> Schedule {
    match is_direct(topology) {
        true => direct_all_gather::schedule(rank, &Parts::even(0, topology.world_size())),
        false => dissemination_barrier::schedule(rank, topology.world_size()),
    }
}

/// Up to this many ranks that share memory send directly to each other: there, a message costs much less than the context
/// switch that comes before each further step if ranks share cores.
pub(crate) const DIRECT_RANKS: usize = 16;

fn is_direct(topology: &Topology) -> bool {
    topology.shares_memory() && topology.world_size() <= DIRECT_RANKS
}

/// Returns the schedule of a reduce-scatter of these parts, of elements of `element_bytes` each, and the number of
/// elements of scratch space that it needs beyond input and output. With several ranks on each host, all ranks send
/// between hosts at the same time, see `hierarchical_reduce_scatter`.
pub fn reduce_scatter(
    rank: usize,
    topology: &Topology,
    parts: &Parts,
    element_bytes: usize,
) -> (Schedule, usize) {
    if topology.is_regular() {
        let schedule = hierarchical_reduce_scatter::schedule(rank, topology, parts);
        return (schedule, hierarchical_reduce_scatter::room(topology, parts));
    }
    let piece = topology.segment_bytes() / topology.world_size().max(1);
    let pieces = pieces(parts.longest() * element_bytes, piece);
    (ring_reduce_scatter::schedule(rank, parts, pieces), ring_reduce_scatter::room(parts, pieces))
}

/// Returns the number of pieces, of at most `piece_bytes`, in which a part of `part_bytes` is sent around a ring: at
/// least 1.
fn pieces(part_bytes: usize, piece_bytes: usize) -> usize {
    part_bytes.div_ceil(piece_bytes.max(1)).max(1)
}

/// Up to this many ranks, f16 and bf16 are sent pairwise, each rank to each other one, in their own dtype; above, as
/// f32 around a ring, in which each rank has two neighbours.
pub(crate) const PAIRWISE_RANKS: usize = 64;

/// Bytes of a segment that is sent along a chain of ranks.
pub(crate) const SEGMENT_BYTES: usize = 256 * 1024;

/// Returns the number of segments for a chain. `None` if a tree is faster, because there are fewer segments than ranks,
/// or only two ranks.
pub fn chain_segments(world_size: usize, len: usize, element_bytes: usize) -> Option<usize> {
    let segments = len.saturating_mul(element_bytes).div_ceil(SEGMENT_BYTES);
    (world_size > 2 && segments >= world_size).then_some(segments)
}

/// Returns the schedule of a broadcast of `len` elements of `element_bytes` each.
pub fn broadcast(rank: usize, world_size: usize, len: usize, element_bytes: usize, root: usize) -> Schedule {
    match chain_segments(world_size, len, element_bytes) {
        Some(segments) => chain_broadcast::schedule(rank, world_size, len, root, segments),
        None => binomial_broadcast::schedule(rank, world_size, len, root),
    }
}

#[cfg(test)]
pub(crate) mod simulate;
#[cfg(test)]
mod timing;
