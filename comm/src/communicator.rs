//! The trait that every backend implements and every strategy uses.

use candle_core::Tensor;

use crate::{Operation, ReduceOp, Result, Work};

/// A group of ranks that talk. Rank r of `world_size` calls the same operations in the same order as the others.
///
/// The methods named after operations return at once; the operation runs on the communicator's own thread, after those
/// submitted before it, and [`Work::wait`] gives its result. [`Communicator::run`] is the blocking form.
pub trait Communicator: Send + Sync + std::fmt::Debug {
    /// This process's place in the group, from 0.
    fn rank(&self) -> usize;

    /// Ranks in the group.
    fn world_size(&self) -> usize;

    /// The backend's name: `local`, `tcp`.
    fn backend(&self) -> &'static str;

    /// Bytes and operations so far.
    fn stats(&self) -> Stats;

    /// Puts an operation into the queue and returns at once.
    ///
    /// # Errors
    /// The caller's mistakes (rank, dtype, element count, layout), and the first cause if the group has failed.
    fn submit(&self, operation: Operation) -> Result<Work>;

    /// Runs an operation to its end, on the calling thread where nothing is queued before it: the quickest way for
    /// small tensors.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`] and of [`Work::wait`].
    fn run(&self, operation: Operation) -> Result<()>;

    /// Every rank's `tensor` becomes the reduction of all of them, in place, equal to the bit on every rank.
    ///
    /// # Shapes
    /// The same on every rank.
    ///
    /// # Cost
    /// Large tensors, S bytes on P ranks: ring, 2(P-1) steps and 2S(P-1)/P bytes sent by each rank. Small ones: recursive
    /// doubling, log2(P) steps and S log2(P) bytes (two steps more where P is no power of two).
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        self.submit(Operation::AllReduce { tensor: tensor.clone(), op })
    }

    /// The tensor of rank `root` becomes the reduction of all; the others keep theirs.
    ///
    /// # Cost
    /// Binomial tree: log2(P) steps; each rank but the root sends S bytes.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<Work> {
        self.submit(Operation::Reduce { tensor: tensor.clone(), op, root })
    }

    /// Every rank's `tensor` becomes that of rank `root`, in place.
    ///
    /// # Cost
    /// Binomial tree: log2(P) steps; the root sends S log2(P) bytes.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        self.submit(Operation::Broadcast { tensor: tensor.clone(), root })
    }

    /// `output` becomes the inputs of all ranks, one after the other.
    ///
    /// # Shapes
    /// `output` has `world_size` times the elements of `input`.
    ///
    /// # Cost
    /// Ring: P-1 steps and S(P-1)/P bytes sent by each rank, where S is the size of `output`.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.submit(Operation::AllGather { output: output.clone(), input: input.clone() })
    }

    /// `output` becomes this rank's part of the reduction of all inputs.
    ///
    /// # Shapes
    /// `input` has `world_size` times the elements of `output`.
    ///
    /// # Cost
    /// Ring: P-1 steps and S(P-1)/P bytes sent by each rank, where S is the size of `input`.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn reduce_scatter(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<Work> {
        self.submit(Operation::ReduceScatter { output: output.clone(), input: input.clone(), op })
    }

    /// No rank's barrier is done before every rank has called it.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn barrier(&self) -> Result<Work> {
        self.submit(Operation::Barrier)
    }

    /// Sends `tensor` to rank `to`. Done when the transport has taken the bytes and the receiver's call was seen to fit.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn send(&self, tensor: &Tensor, to: usize) -> Result<Work> {
        self.submit(Operation::Send { tensor: tensor.clone(), to })
    }

    /// Fills `tensor` with what rank `from` sends.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn recv(&self, tensor: &Tensor, from: usize) -> Result<Work> {
        self.submit(Operation::Recv { tensor: tensor.clone(), from })
    }
}

/// What a communicator has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Operations that ended well.
    pub operations: u64,
    /// Bytes of payload sent to other ranks.
    pub bytes_sent: u64,
    /// Bytes of payload received from other ranks.
    pub bytes_received: u64,
    /// Time spent inside operations, in nanoseconds.
    pub busy_ns: u64,
}
