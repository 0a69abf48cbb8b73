//! Ranks as threads of one process: for tests, examples and simulations.

mod group;
mod links;
mod shared;
mod shrink;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::cause::Cause;
use crate::base::members::Members;
use crate::engine::queue::OperationQueue;
use crate::engine::runner::OperationRunner;
use crate::{Communicator, ElasticGroup, Error, Operation, Result, Stats, Topology, Work};

use links::LocalLinks;
use shared::LocalGroup;

use super::subgroups::Subgroups;

/// One rank of a group whose ranks are threads of this process.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use comm::{Communicator, Local, ReduceOp};
///
/// let sums = Local::run(3, |comm| {
///     let tensor = Tensor::new(&[comm.rank() as f32, 1.0], &Device::Cpu)?;
///     comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
///     Ok(tensor.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(sums, vec![vec![3.0, 3.0]; 3]);
/// # Ok::<(), comm::Error>(())
/// ```
pub struct Local {
    rank: usize,
    shared: Arc<LocalGroup>,
    members: Members,
    // Dropped before the rank is marked as having left.
    engine: Option<OperationQueue>,
    subgroups: Subgroups,
}

/// Time limits of a group of threads.
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// How long each operation may take, as in [`TcpConfig::timeout`](crate::TcpConfig::timeout). Default: 300 s.
    pub timeout: Duration,
    /// How long an operation waits before a warning names the rank that it waits for. Default: 30 s.
    pub slow_warning: Duration,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(300), slow_warning: Duration::from_secs(30) }
    }
}

impl Local {
    /// Creates a group and returns its ranks, each to be moved to a thread of its own.
    ///
    /// # Errors
    /// A world size of 0.
    pub fn group(world_size: usize, config: &LocalConfig) -> Result<Vec<Self>> {
        if world_size == 0 {
            return Err(Error::invalid("world size", world_size, "a group has at least 1 rank"));
        }
        Ok(Self::group_on(&Topology::one_host(world_size), config))
    }

    /// As [`Local::group`], with ranks that count as being on several hosts.
    pub(crate) fn group_on(topology: &Topology, config: &LocalConfig) -> Vec<Self> {
        let world_size = topology.world_size();
        let shared = Arc::new(LocalGroup::new(world_size, config));
        let members = Members::world(world_size);
        (0..world_size).map(|rank| Self::member(rank, &shared, members.clone(), topology.clone())).collect()
    }

    fn member(rank: usize, shared: &Arc<LocalGroup>, members: Members, topology: Topology) -> Self {
        let supervisor = shared.supervisor(rank, members.clone());
        let links = LocalLinks::new(rank, shared.clone());
        let runner = Box::new(OperationRunner::new(rank, topology, links, supervisor.clone()));
        let engine = Some(OperationQueue::new(rank, shared.world_size(), runner, supervisor));
        Self { rank, shared: shared.clone(), members, engine, subgroups: Subgroups::default() }
    }

    /// Creates a group and runs `body` on `world_size` threads, one for each rank. Returns the results by rank.
    ///
    /// # Errors
    /// The first error that is not merely the consequence of another rank's failure. A panic in `body` counts as the
    /// death of its rank.
    pub fn run<T: Send>(world_size: usize, body: impl Fn(&Local) -> Result<T> + Sync) -> Result<Vec<T>> {
        Self::run_each(world_size, |comm| body(&comm))
    }

    /// As [`Local::run`], for a `body` that keeps its communicator: for example a strategy that owns it, and closes it
    /// when dropped.
    ///
    /// # Errors
    /// Those of [`Local::run`].
    ///
    /// ```
    /// use std::sync::Arc;
    /// use comm::{Communicator, Local};
    ///
    /// let ranks = Local::run_shared(2, |comm: Arc<dyn Communicator>| Ok(comm.rank()))?;
    /// assert_eq!(ranks, [0, 1]);
    /// # Ok::<(), comm::Error>(())
    /// ```
    pub fn run_shared<T: Send>(
        world_size: usize,
        body: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        Self::run_each(world_size, |comm| body(Arc::new(comm)))
    }

    fn run_each<T: Send>(world_size: usize, body: impl Fn(Local) -> Result<T> + Sync) -> Result<Vec<T>> {
        let group = Self::group(world_size, &LocalConfig::default())?;
        let results: Vec<Result<T>> = std::thread::scope(|scope| {
            let threads: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| body(comm))).collect();
            let died = |rank| Error::PeerDied {
                rank,
                host: "this process".into(),
                operation: "Local::run: it panicked".into(),
            };
            threads
                .into_iter()
                .enumerate()
                .map(|(rank, thread)| thread.join().unwrap_or_else(|_| Err(died(rank))))
                .collect()
        });
        let first_cause = results
            .iter()
            .filter_map(|result| result.as_ref().err())
            .min_by_key(|error| error.is_peer_failure());
        match first_cause.cloned() {
            Some(error) => Err(error),
            None => results.into_iter().collect(),
        }
    }

    fn engine(&self) -> Result<&OperationQueue> {
        self.engine.as_ref().ok_or_else(|| Error::system("local group", "it is closed"))
    }
}

impl Communicator for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared.world_size()
    }

    fn backend(&self) -> &'static str {
        "local"
    }

    /// Less than a stream can hold.
    fn eager_bytes(&self) -> usize {
        64 << 10
    }

    fn stats(&self) -> Stats {
        self.engine.as_ref().map(OperationQueue::stats).unwrap_or_default()
    }

    fn world_ranks(&self) -> &[usize] {
        self.members.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let mut group = self.join_group(ranks)?;
        group.subgroups = self.subgroups.clone();
        Ok(self.subgroups.add(group))
    }

    fn elastic(&self) -> Result<&dyn ElasticGroup> {
        Ok(self)
    }

    fn abort(&self) {
        self.engine.iter().for_each(OperationQueue::abort);
        self.shared.leave(self.rank, false);
    }

    fn announce_failure(&self, reason: &str) {
        let number = self.members.world_rank(self.rank);
        self.shared.reasons().record(number, Cause::program(number, reason));
    }

    fn submit(&self, operation: Operation) -> Result<Work> {
        self.engine()?.submit(operation).map(Work::new)
    }

    fn run(&self, operation: Operation) -> Result<()> {
        self.engine()?.run(operation)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        let died = std::thread::panicking();
        if died {
            self.shared.leave(self.rank, died);
        }
        self.engine.take();
        self.shared.leave(self.rank, died);
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Local(rank {} of {})", self.rank, self.world_size())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::ReduceOp;

    /// Returns what each rank of `topology` has after an all-reduce, and after a reduce-scatter followed by an all-gather
    /// of its result.
    fn reduced(topology: &Topology, len: usize, dtype: DType, op: ReduceOp) -> [Vec<Vec<f64>>; 2] {
        let ranks = topology.world_size();
        let group = Local::group_on(topology, &LocalConfig::default());
        let body = |comm: Local| {
            let own: Vec<f64> = (0..len).map(|index| (index % 97 + 3 * comm.rank()) as f64 / 8.0).collect();
            let own = Tensor::new(own, &Device::Cpu)?.to_dtype(dtype)?;
            let (part, gathered) = (own.narrow(0, 0, len / ranks)?.copy()?, own.zeros_like()?);
            let (input, gathered) = (
                own.narrow(0, 0, len / ranks * ranks)?.copy()?,
                gathered.narrow(0, 0, len / ranks * ranks)?.copy()?,
            );
            comm.reduce_scatter(&part, &input, op)?.wait()?;
            comm.all_gather(&gathered, &part)?.wait()?;
            comm.all_reduce(&own, op)?.wait()?;
            Ok([own, gathered].map(|tensor| tensor.to_dtype(DType::F64).unwrap().to_vec1().unwrap()))
        };
        let all: Result<Vec<[Vec<f64>; 2]>> = std::thread::scope(|scope| {
            let threads: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| body(comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let (reduced, gathered) = all.unwrap().into_iter().map(|[a, b]| (a, b)).unzip();
        [reduced, gathered]
    }

    #[test]
    fn hosts_change_nothing_but_the_order_of_sums() {
        let exact = [(DType::F64, ReduceOp::Sum), (DType::F32, ReduceOp::Max), (DType::F32, ReduceOp::Avg)];
        let halves = [(DType::BF16, ReduceOp::Sum), (DType::F16, ReduceOp::Avg)];
        for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 1], &[0, 1, 2, 0], &[0, 0, 0, 1, 1, 1, 2, 2, 2]] {
            let topology = Topology::of(hosts);
            let together = Topology::one_host(topology.world_size());
            for (dtype, op) in exact.into_iter().chain(halves) {
                // Multiples of 1/8, and small: sums are exact in any order.
                for len in [0, 1, 40_000, 300_001] {
                    let case = format!("{hosts:?} {dtype:?} {op:?} {len}");
                    let expected = reduced(&together, len, dtype, op);
                    for (spread, expected) in reduced(&topology, len, dtype, op).iter().zip(&expected) {
                        assert!(spread.iter().all(|rank| *rank == spread[0]), "{case}");
                        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * b.abs();
                        assert!(spread[0].iter().zip(&expected[0]).all(near), "{case}");
                    }
                }
            }
        }
    }
}
