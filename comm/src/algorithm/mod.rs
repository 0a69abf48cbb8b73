//! The algorithms, one a file, each a pure function from rank, world size and length to a [`Schedule`].

pub mod binomial_broadcast;
pub mod binomial_reduce;
pub mod dissemination_barrier;
pub mod recursive_doubling;
pub mod ring_all_gather;
pub mod ring_all_reduce;
pub mod ring_reduce_scatter;
pub mod segmented;

use crate::schedule::Schedule;

/// Up to this many bytes, an all-reduce takes the algorithm of few steps; above, the one of few bytes.
pub const LATENCY_BYTES: usize = 64 * 1024;

/// The all-reduce for a buffer of `len` elements of `element_bytes` each; a long one goes in segments of about
/// `segment_bytes`, see [`segmented`].
pub fn all_reduce(
    rank: usize,
    world_size: usize,
    len: usize,
    element_bytes: usize,
    segment_bytes: usize,
) -> Schedule {
    if len.saturating_mul(element_bytes) <= LATENCY_BYTES {
        recursive_doubling::schedule(rank, world_size, len)
    } else {
        let segment = segment_bytes / element_bytes.max(1);
        segmented::schedule(len, segment, |len| ring_all_reduce::schedule(rank, world_size, len))
    }
}

#[cfg(test)]
pub(crate) mod simulate;
