//! What a collective sends and how many steps it takes, by `comm`'s algorithms.

use comm::algorithm::{LATENCY_BYTES, chain_segments};

/// The cost of some communication, for the rank that has the most of it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes sent.
    pub bytes: f64,
    /// Steps, each of which costs a latency.
    pub steps: f64,
}

impl Traffic {
    /// The time that it takes, in seconds, with a bandwidth in bytes per second and a latency in seconds.
    pub fn seconds(self, bandwidth: f64, latency: f64) -> f64 {
        let sending = if self.bytes > 0.0 { self.bytes / bandwidth } else { 0.0 };
        sending + self.steps * latency
    }

    /// So many times the same.
    pub fn times(self, count: usize) -> Self {
        Self { bytes: self.bytes * count as f64, steps: self.steps * count as f64 }
    }
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.steps += other.steps;
    }
}

impl std::iter::Sum for Traffic {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

/// An all-reduce of so many bytes: recursive doubling where they are few, a ring where they are many.
pub fn all_reduce(bytes: u64, ranks: usize) -> Traffic {
    if ranks < 2 || bytes == 0 {
        return Traffic::default();
    }
    if bytes <= LATENCY_BYTES as u64 {
        // Ranks beyond a power of two give theirs to another one first, and get the sum from it in the end.
        let steps = ranks.ilog2() as f64;
        let more = if ranks.is_power_of_two() { 0.0 } else { 1.0 };
        return Traffic { bytes: bytes as f64 * (steps + more), steps: steps + 2.0 * more };
    }
    part(bytes, ranks).times(2)
}

/// The same for the first rank, which has another one do its part where ranks are no power of two.
pub fn all_reduce_of_first(bytes: u64, ranks: usize) -> Traffic {
    let most = all_reduce(bytes, ranks);
    match bytes <= LATENCY_BYTES as u64 && !ranks.is_power_of_two() {
        true => Traffic { bytes: most.bytes.min(bytes as f64), ..most },
        false => most,
    }
}

/// A broadcast of so many bytes, for the rank that has them: a tree where they are few, a chain where they are many.
pub fn broadcast(bytes: u64, ranks: usize) -> Traffic {
    if ranks < 2 || bytes == 0 {
        return Traffic::default();
    }
    match chain_segments(ranks, bytes as usize, 1) {
        Some(segments) => Traffic { bytes: bytes as f64, steps: (ranks - 1 + segments - 1) as f64 },
        None => message(bytes).times(ranks.next_power_of_two().ilog2() as usize),
    }
}

/// An all-gather or a reduce-scatter of so many bytes in all.
pub fn part(bytes: u64, ranks: usize) -> Traffic {
    if ranks < 2 || bytes == 0 {
        return Traffic::default();
    }
    let others = (ranks - 1) as f64;
    Traffic { bytes: bytes as f64 * others / ranks as f64, steps: others }
}

/// A message.
pub fn message(bytes: u64) -> Traffic {
    Traffic { bytes: bytes as f64, steps: 1.0 }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use comm::{Communicator, Local, Operation, ReduceOp};

    use super::*;

    /// The most that a rank sends in an operation.
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
            for len in [840, 8400, 84_000, 840_000] {
                let op = ReduceOp::Sum;
                let all = by_rank(ranks, |_| Operation::AllReduce { tensor: zeros(len), op });
                assert_eq!(all_reduce_of_first(4 * len as u64, ranks).bytes, all[0] as f64, "{ranks}, {len}");
                let reduced = *all.iter().max().unwrap();
                assert_eq!(all_reduce(4 * len as u64, ranks).bytes, reduced as f64, "{ranks} ranks, {len}");
                let spread = sent(ranks, |_| Operation::Broadcast { tensor: zeros(len), root: 0 });
                assert_eq!(broadcast(4 * len as u64, ranks).bytes, spread as f64, "{ranks} ranks, {len}");
                let gathered = sent(ranks, |_| Operation::AllGather {
                    output: zeros(len),
                    input: zeros(len / ranks),
                    counts: None,
                });
                assert_eq!(part(4 * (len / ranks * ranks) as u64, ranks).bytes, gathered as f64);
                if len % ranks > 0 {
                    continue;
                }
                let scattered = sent(ranks, |_| Operation::ReduceScatter {
                    output: zeros(len / ranks),
                    input: zeros(len),
                    op,
                    counts: None,
                });
                assert_eq!(part(4 * len as u64, ranks).bytes, scattered as f64);
            }
        }
    }

    #[test]
    fn time_is_latency_and_bandwidth() {
        let traffic = all_reduce(1_000_000, 4);
        assert_eq!(traffic, Traffic { bytes: 1_500_000.0, steps: 6.0 });
        assert!((traffic.seconds(1e9, 1e-4) - 0.0021).abs() < 1e-12);
        assert_eq!(Traffic::default().seconds(0.0, 1.0), 0.0);
    }
}
