//! Bytes sent by a collective, with the algorithms of `comm`.

use comm::algorithm::{LATENCY_BYTES, chain_segments};

/// Returns the bytes sent in an all-reduce, by the rank that sends most: recursive doubling for small buffers, ring for
/// large ones.
pub(crate) fn all_reduce(bytes: u64, ranks: usize) -> f64 {
    if ranks < 2 || bytes == 0 {
        return 0.0;
    }
    if bytes <= LATENCY_BYTES as u64 {
        // Recursive doubling: ranks beyond a power of two send their data to a partner first, and receive the sum from
        // it at the end.
        let more = if ranks.is_power_of_two() { 0 } else { 1 };
        return bytes as f64 * (ranks.ilog2() + more) as f64;
    }
    2.0 * part(bytes, ranks)
}

/// As [`all_reduce`], for rank 0: in recursive doubling it hands its part to a partner if the number of ranks is not a
/// power of two.
pub(crate) fn all_reduce_of_first(bytes: u64, ranks: usize) -> f64 {
    let most = all_reduce(bytes, ranks);
    match bytes <= LATENCY_BYTES as u64 && !ranks.is_power_of_two() {
        true => most.min(bytes as f64),
        false => most,
    }
}

/// Returns the bytes that the root of a broadcast sends: tree for small buffers, chain for large ones.
pub(crate) fn broadcast(bytes: u64, ranks: usize) -> f64 {
    if ranks < 2 || bytes == 0 {
        return 0.0;
    }
    match chain_segments(ranks, bytes as usize, 1) {
        Some(_) => bytes as f64,
        None => bytes as f64 * ranks.next_power_of_two().ilog2() as f64,
    }
}

/// Returns the bytes that a rank sends in an all-gather or a reduce-scatter of `bytes` in total.
pub(crate) fn part(bytes: u64, ranks: usize) -> f64 {
    if ranks < 2 { 0.0 } else { bytes as f64 * (ranks - 1) as f64 / ranks as f64 }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use comm::{Communicator, Local, Operation, ReduceOp};

    use super::*;

    /// Returns the bytes sent in an operation, by the rank that sends most.
    fn sent(ranks: usize, operation: impl Fn(usize) -> Operation + Sync) -> u64 {
        by_rank(ranks, operation).into_iter().max().unwrap()
    }

    fn by_rank(ranks: usize, operation: impl Fn(usize) -> Operation + Sync) -> Vec<u64> {
        let sent = Local::run(ranks, |comm| {
            comm.run(operation(comm.rank()))?;
            Ok(comm.stats().bytes_sent)
        });
        sent.unwrap()
    }

    #[test]
    fn bytes_are_those_that_are_sent() {
        let zeros = |len: usize| Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap();
        for ranks in [1, 2, 3, 4, 5, 8] {
            // Lengths that these numbers of ranks, and the segments of large buffers, divide.
            for len in [840, 8400, 84_000, 846_720] {
                let op = ReduceOp::Sum;
                let all = by_rank(ranks, |_| Operation::AllReduce { tensor: zeros(len), op });
                assert_eq!(all_reduce_of_first(4 * len as u64, ranks), all[0] as f64, "{ranks}, {len}");
                let reduced = *all.iter().max().unwrap();
                assert_eq!(all_reduce(4 * len as u64, ranks), reduced as f64, "{ranks} ranks, {len}");
                let spread = sent(ranks, |_| Operation::Broadcast { tensor: zeros(len), root: 0 });
                assert_eq!(broadcast(4 * len as u64, ranks), spread as f64, "{ranks} ranks, {len}");
                let gathered = sent(ranks, |_| Operation::AllGather {
                    output: zeros(len),
                    input: zeros(len / ranks),
                    counts: None,
                });
                assert_eq!(part(4 * (len / ranks * ranks) as u64, ranks), gathered as f64);
                if len % ranks > 0 {
                    continue;
                }
                let scattered = sent(ranks, |_| Operation::ReduceScatter {
                    output: zeros(len / ranks),
                    input: zeros(len),
                    op,
                    counts: None,
                });
                assert_eq!(part(4 * len as u64, ranks), scattered as f64);
            }
        }
    }
}
