//! The algorithms, one a file, each a pure function from rank, world size and length to a [`Schedule`].

pub mod binomial_broadcast;
pub mod binomial_reduce;
pub mod chain_broadcast;
pub mod chain_reduce;
pub mod direct_gather;
pub mod direct_scatter;
pub mod dissemination_barrier;
pub mod hierarchical_all_gather;
pub mod hierarchical_all_reduce;
pub mod hierarchical_reduce_scatter;
pub mod pairwise_all_reduce;
pub mod pairwise_all_to_all;
pub mod pairwise_reduce;
pub mod pairwise_reduce_scatter;
pub mod recursive_doubling;
pub mod ring_all_gather;
pub mod ring_all_reduce;
pub mod ring_reduce_scatter;
pub mod schedule;
pub mod segmented;
pub(crate) mod topology;

use crate::Topology;
use crate::algorithm::schedule::{Parts, Schedule};

/// Up to this many bytes, an all-reduce takes the algorithm of few steps; above, the one of few bytes. Measured with
/// `comm-bench` on 2 cores, the two are level at 48 KiB (2 ranks) and 96 KiB (4 ranks) through shared memory, at 512 KiB and
/// 192 KiB over TCP.
pub const LATENCY_BYTES: usize = 64 * 1024;

/// The all-reduce for a buffer of `len` elements of `element_bytes` each; on one host a long one goes in segments, see
/// [`segmented`]; between hosts each byte goes once, see [`hierarchical_all_reduce`].
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

/// The all-gather of these parts, on the output: between hosts side by side, see [`hierarchical_all_gather`].
pub fn all_gather(rank: usize, topology: &Topology, parts: &Parts) -> Schedule {
    match topology.is_regular() {
        true => hierarchical_all_gather::schedule(rank, topology, parts),
        false => ring_all_gather::schedule(rank, parts),
    }
}

/// The reduce-scatter of these parts, of elements of `element_bytes` each, and the elements that it needs beyond input and output:
/// between hosts side by side, see [`hierarchical_reduce_scatter`].
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

/// In how many pieces, of at most `piece_bytes`, a part of `part_bytes` goes round a ring: at least 1.
fn pieces(part_bytes: usize, piece_bytes: usize) -> usize {
    part_bytes.div_ceil(piece_bytes.max(1)).max(1)
}

/// Up to so many ranks, f16 and bf16 go pairwise, each rank to each other one, as they are; above, as f32 round a ring, in
/// which each rank has two neighbours.
pub const PAIRWISE_RANKS: usize = 64;

/// Bytes of a segment that goes along a chain of ranks.
pub const SEGMENT_BYTES: usize = 256 * 1024;

/// The number of segments for a chain: none where a tree is quicker, because its depth is less than the length of the
/// chain, counted in segments.
pub fn chain_segments(world_size: usize, len: usize, element_bytes: usize) -> Option<usize> {
    let segments = len.saturating_mul(element_bytes).div_ceil(SEGMENT_BYTES);
    (world_size > 2 && segments >= world_size).then_some(segments)
}

/// The broadcast for a buffer of `len` elements of `element_bytes` each.
pub fn broadcast(rank: usize, world_size: usize, len: usize, element_bytes: usize, root: usize) -> Schedule {
    match chain_segments(world_size, len, element_bytes) {
        Some(segments) => chain_broadcast::schedule(rank, world_size, len, root, segments),
        None => binomial_broadcast::schedule(rank, world_size, len, root),
    }
}

#[cfg(test)]
pub(crate) mod simulate;
