//! Communicator trait, implemented by every backend.

pub(crate) mod elastic;
pub(crate) mod group;

use std::sync::Arc;

use candle_core::Tensor;

use crate::{ElasticGroup, Message, Operation, ReduceOp, Result, Stats, Work};

/// A group of ranks that communicate. Rank r of `world_size` calls the same operations in the same order as the others.
///
/// The methods named after operations return at once; the operation runs on the communicator's own thread, after those
/// submitted before it, and [`Work::wait`] returns its result. [`Communicator::run`] is the blocking form.
pub trait Communicator: Send + Sync + std::fmt::Debug {
    /// Returns this process's rank in the group, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn world_size(&self) -> usize;

    /// Returns the backend's name: `local`, `tcp`, `nccl`, `mpi`.
    fn backend(&self) -> &'static str;

    /// Returns the ranks with which this one exchanges data through shared memory so far. Empty if the backend does not
    /// know.
    fn shared_memory_ranks(&self) -> &[usize] {
        &[]
    }

    /// Returns how many bytes a rank can send to another before that one receives any of them, including a header of 32
    /// bytes for each message: the capacity of the transport's buffers. For more bytes, and for any if this is 0,
    /// [`Communicator::run`] of a send may wait until the other rank receives.
    fn eager_bytes(&self) -> usize {
        0
    }

    /// Returns the statistics of the operations that have ended. Does not wait for one in progress.
    fn stats(&self) -> Stats;

    /// Returns the members by their rank in the first group, that of all processes: `world_ranks()[r]` is rank r of
    /// this group.
    fn world_ranks(&self) -> &[usize];

    /// Creates a group of `ranks` of this one, in which `ranks[r]` is rank r. To be called on those ranks and on no
    /// other, with the same list, at the same position among their operations: [`Communicator::new_group`] and
    /// [`Communicator::split`] ensure that.
    ///
    /// # Errors
    /// This rank is not among `ranks`; failures to connect the members.
    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>>;

    /// Creates a group of `ranks` of this one, in which `ranks[r]` is rank r. Returns `None` on ranks that are not
    /// among them. Every rank of this group must call it, with the same list.
    ///
    /// The order of the list is that of the group: in `new_group(&[2, 0])` rank 2 is rank 0. `torch.distributed.new_group` sorts
    /// its list first, so that rank 0 is rank 0 there: give a sorted list where ranks are to be those of a PyTorch program.
    ///
    /// Groups are independent of each other: their operations run at the same time, and closing one, by dropping it,
    /// does not affect the others. Over NCCL they share a GPU, where the order of simultaneous operations may matter:
    /// see `Nccl`.
    ///
    /// # Cost
    /// An all-gather of one number; then the members connect as at the start of a job.
    ///
    /// # Errors
    /// A list that is empty, repeats a rank, or is not the same on every rank; failures to connect the members.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use comm::{Communicator, Local, ReduceOp};
    ///
    /// let sums = Local::run(3, |comm| {
    ///     let Some(pair) = comm.new_group(&[2, 0])? else { return Ok(None) };
    ///     let tensor = Tensor::new(&[comm.rank() as u32], &Device::Cpu)?;
    ///     pair.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
    ///     Ok(Some((pair.rank(), tensor.to_vec1::<u32>()?[0])))
    /// })?;
    /// assert_eq!(sums, [Some((1, 2)), None, Some((0, 2))]);
    /// # Ok::<(), comm::Error>(())
    /// ```
    fn new_group(&self, ranks: &[usize]) -> Result<Option<Arc<dyn Communicator>>> {
        group::agree(self, ranks)?;
        if ranks.contains(&self.rank()) { self.subgroup(ranks).map(Some) } else { Ok(None) }
    }

    /// Divides this group into one for each color, in which ranks are ordered by `key`, then by their rank here. A rank
    /// without a color gets `None`. Every rank of this group must call it.
    ///
    /// # Cost
    /// An all-gather of three numbers; then the members of each group connect as at the start of a job.
    ///
    /// # Errors
    /// Failures to connect the members.
    fn split(&self, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn Communicator>>> {
        match group::members_of_color(self, color, key)? {
            Some(members) => self.subgroup(&members).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the group as an elastic one, which can lose ranks and admit new ones while it runs.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if the backend does not support changing the ranks of a group.
    fn elastic(&self) -> Result<&dyn ElasticGroup> {
        Err(crate::Error::not_elastic("shrink and grow", self.backend()))
    }

    /// Ends the operations in progress and in the queue, at once: waiting for their [`Work`] returns
    /// [`crate::Error::Aborted`], and so does every later call. The other ranks are notified that this one has left the
    /// group. May be called on any thread, also while another one waits.
    ///
    /// Dropping a communicator without calling this lets queued operations finish, as long as the other ranks take part
    /// in them. If an operation receives nothing from them for 3 s (or the time-out, if that is shorter), it is
    /// aborted, with all operations behind it.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use comm::{Communicator, Error, Local, LocalConfig};
    ///
    /// let ranks = Local::group(2, &LocalConfig::default())?;
    /// let work = ranks[0].recv(&Tensor::zeros(3, DType::F32, &Device::Cpu)?, 1)?;
    /// ranks[0].abort();
    /// assert!(matches!(work.wait(), Err(Error::Aborted { .. })));
    /// # Ok::<(), Error>(())
    /// ```
    fn abort(&self) {}

    /// Says why this rank cannot go on. To be called before it closes the groups in which others wait for it: there, and in
    /// groups that these close in turn, they return [`crate::Error::PeerFailed`] with this reason, in place of
    /// [`crate::Error::PeerLeft`]. By default this does nothing: a communicator that wraps another one must forward it.
    ///
    /// # Cost
    /// Nothing is sent before a group is closed. The reason goes with the goodbye, over the connections that the group has.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use comm::{Communicator, Local};
    ///
    /// let error = Local::run(2, |comm| {
    ///     if comm.rank() == 0 {
    ///         comm.announce_failure("the disk is full");
    ///         return Ok(None);
    ///     }
    ///     let tensor = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
    ///     Ok(comm.recv(&tensor, 0)?.wait().err())
    /// })?;
    /// assert_eq!(error[1].as_ref().unwrap().to_string(), "rank 0 could not go on: the disk is full");
    /// # Ok::<(), comm::Error>(())
    /// ```
    fn announce_failure(&self, _reason: &str) {}

    /// Queues an operation and returns at once.
    ///
    /// # Errors
    /// Mistakes of the caller (rank, dtype, element count, layout, tensors that overlap), and the first cause if the
    /// group has failed.
    fn submit(&self, operation: Operation) -> Result<Work>;

    /// Runs an operation to its end, on the calling thread if nothing is queued before it: the fastest way for small
    /// tensors.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`] and of [`Work::wait`].
    fn run(&self, operation: Operation) -> Result<()>;

    /// Every rank's `tensor` becomes the reduction of all of them, in place, bitwise equal on every rank.
    ///
    /// # Shapes
    /// The same on every rank.
    ///
    /// # Cost
    /// Large tensors, S bytes on P ranks: ring, 2(P-1) steps and 2S(P-1)/P bytes sent by each rank. Small ones: recursive
    /// doubling, log2(P) steps and S log2(P) bytes (two steps more where P is no power of two).
    ///
    /// f16 and bf16 are summed in f32 and rounded once. Large tensors are sent pairwise in their own dtype, with S in
    /// that dtype: 2 steps and 2S(P-1)/P bytes, half of what f32 would take. Up to 64 KiB (in f32), and with more than
    /// 64 ranks, they are sent as f32 by the algorithms above.
    ///
    /// With several ranks on each of several hosts, large tensors are reduced within each host first (f16 and bf16 as
    /// f32), then between hosts, so that less crosses the network.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        self.submit(Operation::AllReduce { tensor: tensor.clone(), op })
    }

    /// The tensor of rank `root` becomes the reduction of all; the others keep theirs.
    ///
    /// # Cost
    /// Binomial tree: log2(P) steps; each rank but the root sends S bytes. Large tensors: pipelined chain, in which no
    /// rank sends or receives more than S bytes. Large tensors of f16 and bf16, with up to 64 ranks: pairwise, 2 steps
    /// and S bytes.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<Work> {
        self.submit(Operation::Reduce { tensor: tensor.clone(), op, root })
    }

    /// Every rank's `tensor` becomes that of rank `root`, in place.
    ///
    /// # Cost
    /// Binomial tree: log2(P) steps; the root sends S log2(P) bytes. Large tensors: pipelined chain, in which no rank sends
    /// more than S bytes.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        self.submit(Operation::Broadcast { tensor: tensor.clone(), root })
    }

    /// `output` becomes the inputs of all ranks, one after the other.
    ///
    /// # Shapes
    /// `output` has `world_size` times the elements of `input`, which may be this rank's part of it, and may not overlap it
    /// otherwise.
    ///
    /// # Cost
    /// Ring: P-1 steps and S(P-1)/P bytes sent by each rank, where S is the size of `output`.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.submit(Operation::AllGather { output: output.clone(), input: input.clone(), counts: None })
    }

    /// `output` becomes this rank's part of the reduction of all inputs.
    ///
    /// # Shapes
    /// `input` has `world_size` times the elements of `output`, which may be this rank's part of it, and may not overlap it
    /// otherwise.
    ///
    /// # Cost
    /// Ring: P-1 steps and S(P-1)/P bytes sent by each rank, where S is the size of `input`.
    /// f16 and bf16, with up to 64 ranks: pairwise, 1 step, the same number of bytes. With equally many ranks, two or more,
    /// on each of several hosts, large tensors (f16 and bf16 as f32) are reduced within each host first.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn reduce_scatter(&self, output: &Tensor, input: &Tensor, op: ReduceOp) -> Result<Work> {
        self.submit(Operation::ReduceScatter {
            output: output.clone(),
            input: input.clone(),
            op,
            counts: None,
        })
    }

    /// As [`Communicator::all_gather`], with inputs of different lengths.
    ///
    /// # Shapes
    /// `input` on rank r has `counts[r]` elements, `output` all of them. `counts` is the same list on every rank.
    ///
    /// # Cost
    /// Ring: P-1 steps; each rank sends all parts but that of the next rank.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the ranks' `counts` differ.
    fn all_gather_v(&self, output: &Tensor, input: &Tensor, counts: &[usize]) -> Result<Work> {
        let counts = Some(counts.to_vec());
        self.submit(Operation::AllGather { output: output.clone(), input: input.clone(), counts })
    }

    /// As [`Communicator::reduce_scatter`], with parts of different lengths.
    ///
    /// # Shapes
    /// `output` on rank r has `counts[r]` elements, `input` all of them. `counts` is the same list on every rank.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the ranks' `counts` differ.
    fn reduce_scatter_v(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
        counts: &[usize],
    ) -> Result<Work> {
        let counts = Some(counts.to_vec());
        self.submit(Operation::ReduceScatter { output: output.clone(), input: input.clone(), op, counts })
    }

    /// The `output` of rank `root` becomes the inputs of all ranks, one after the other.
    ///
    /// # Shapes
    /// `output`, given on the root and only there, has `world_size` times the elements of `input`, which may be the root's part
    /// of it, and may not overlap it otherwise.
    ///
    /// # Cost
    /// One step; each rank but the root sends its input, once.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn gather(&self, output: Option<&Tensor>, input: &Tensor, root: usize) -> Result<Work> {
        let (output, input) = (output.cloned(), input.clone());
        self.submit(Operation::Gather { output, input, root, counts: None })
    }

    /// As [`Communicator::gather`], with inputs of different lengths.
    ///
    /// # Shapes
    /// `input` on rank r has `counts[r]` elements, `output` on the root all; `counts` is the same on every rank.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the ranks' `counts` differ.
    fn gather_v(
        &self,
        output: Option<&Tensor>,
        input: &Tensor,
        root: usize,
        counts: &[usize],
    ) -> Result<Work> {
        let (output, input, counts) = (output.cloned(), input.clone(), Some(counts.to_vec()));
        self.submit(Operation::Gather { output, input, root, counts })
    }

    /// Every rank's `output` becomes its part of the `input` of rank `root`.
    ///
    /// # Shapes
    /// `input`, given on the root and only there, has `world_size` times the elements of `output`, which may be the root's part
    /// of it, and may not overlap it otherwise.
    ///
    /// # Cost
    /// One step; the root sends S(P-1)/P bytes, where S is the size of `input`.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn scatter(&self, output: &Tensor, input: Option<&Tensor>, root: usize) -> Result<Work> {
        let (output, input) = (output.clone(), input.cloned());
        self.submit(Operation::Scatter { output, input, root, counts: None })
    }

    /// As [`Communicator::scatter`], with parts of different lengths.
    ///
    /// # Shapes
    /// `output` on rank r has `counts[r]` elements, `input` on the root all; `counts` is the same on every rank.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the ranks' `counts` differ.
    fn scatter_v(
        &self,
        output: &Tensor,
        input: Option<&Tensor>,
        root: usize,
        counts: &[usize],
    ) -> Result<Work> {
        let (output, input, counts) = (output.clone(), input.cloned(), Some(counts.to_vec()));
        self.submit(Operation::Scatter { output, input, root, counts })
    }

    /// The r-th part of `output` becomes this rank's part of the `input` of rank r.
    ///
    /// # Shapes
    /// Both have the same number of elements, a multiple of `world_size`, the same on every rank. They may not overlap:
    /// the operation is not in place.
    ///
    /// # Cost
    /// P-1 steps and S(P-1)/P bytes sent by each rank, where S is the size of `input`.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn all_to_all(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        let (output, input) = (output.clone(), input.clone());
        self.submit(Operation::AllToAll { output, input, output_counts: None, input_counts: None })
    }

    /// As [`Communicator::all_to_all`], with parts of different lengths. Each rank knows only its own counts. If one
    /// rank calls this, all must, also those whose parts happen to be equal.
    ///
    /// # Shapes
    /// `input` has `input_counts[r]` elements for rank r, which must equal the entry for this rank in rank r's
    /// `output_counts`.
    ///
    /// # Cost
    /// P-1 steps; each rank sends all of its input but its own part.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the count that one rank sends
    /// is not the count that the other expects.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use comm::{Communicator, Local};
    ///
    /// let received = Local::run(2, |comm| {
    ///     // Rank 0 keeps one element and sends two; rank 1 sends none and keeps one.
    ///     let (input, goes, comes) = match comm.rank() {
    ///         0 => (vec![1u32, 2, 3], [1, 2], [1, 0]),
    ///         _ => (vec![4], [0, 1], [2, 1]),
    ///     };
    ///     let input = Tensor::new(input, &Device::Cpu)?;
    ///     let output = Tensor::zeros(comes[0] + comes[1], DType::U32, &Device::Cpu)?;
    ///     comm.all_to_all_v(&output, &input, &comes, &goes)?.wait()?;
    ///     Ok(output.to_vec1::<u32>()?)
    /// })?;
    /// assert_eq!(received, [vec![1], vec![2, 3, 4]]);
    /// # Ok::<(), comm::Error>(())
    /// ```
    fn all_to_all_v(
        &self,
        output: &Tensor,
        input: &Tensor,
        output_counts: &[usize],
        input_counts: &[usize],
    ) -> Result<Work> {
        let (output, input) = (output.clone(), input.clone());
        let (output_counts, input_counts) = (Some(output_counts.to_vec()), Some(input_counts.to_vec()));
        self.submit(Operation::AllToAll { output, input, output_counts, input_counts })
    }

    /// The barrier is done on no rank before every rank has called it.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`].
    fn barrier(&self) -> Result<Work> {
        self.submit(Operation::Barrier)
    }

    /// Sends `tensor` to rank `to`. Done when the transport has taken the bytes, which may be before the receiver has
    /// called. From then on `tensor` may be changed, but the receiver may not have received it yet.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]. Only the sender announces a message: if the receiver's call has another dtype
    /// or element count, the receiver's call returns [`crate::Error::Mismatch`], and on this rank a later call does.
    fn send(&self, tensor: &Tensor, to: usize) -> Result<Work> {
        self.submit(Operation::Send { tensor: tensor.clone(), to })
    }

    /// Fills `tensor` with the message sent by rank `from`.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the message has another dtype
    /// or element count.
    fn recv(&self, tensor: &Tensor, from: usize) -> Result<Work> {
        self.submit(Operation::Recv { tensor: tensor.clone(), from })
    }

    /// Sends and receives several tensors at the same time. The order of the messages, here and on the peers, cannot
    /// cause a deadlock. Messages from one rank to another keep their order. The peers may use [`Communicator::send`]
    /// and [`Communicator::recv`] as well. A received tensor may not overlap another one.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; as for [`Communicator::send`] and [`Communicator::recv`].
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use comm::{Communicator, Local, Message};
    ///
    /// let received = Local::run(2, |comm| {
    ///     let peer = 1 - comm.rank();
    ///     let mine = Tensor::new(&[comm.rank() as u32], &Device::Cpu)?;
    ///     let theirs = Tensor::zeros(1, DType::U32, &Device::Cpu)?;
    ///     let send = Message::Send { tensor: mine, to: peer };
    ///     comm.batch(vec![send, Message::Recv { tensor: theirs.clone(), from: peer }])?.wait()?;
    ///     Ok(theirs.to_vec1::<u32>()?[0])
    /// })?;
    /// assert_eq!(received, [1, 0]);
    /// # Ok::<(), comm::Error>(())
    /// ```
    fn batch(&self, messages: Vec<Message>) -> Result<Work> {
        self.submit(Operation::Batch { messages })
    }

    /// [`Communicator::all_reduce`] of several tensors as one operation: many small ones take as long as one.
    ///
    /// # Shapes
    /// The same list on every rank, all of one dtype. No two tensors may overlap.
    ///
    /// # Cost
    /// That of one tensor with all elements; the tensors are not copied together.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the ranks' lists differ.
    fn all_reduce_coalesced(&self, tensors: &[Tensor], op: ReduceOp) -> Result<Work> {
        self.submit(Operation::AllReduceCoalesced { tensors: tensors.to_vec(), op })
    }

    /// [`Communicator::broadcast`] of several tensors, of any dtypes, as one operation.
    ///
    /// # Shapes
    /// The same list on every rank.
    ///
    /// # Cost
    /// That of one tensor with all bytes; the tensors are not copied together.
    ///
    /// # Errors
    /// Those of [`Communicator::submit`]; waiting gives [`crate::Error::Mismatch`] where the ranks' lists differ.
    fn broadcast_coalesced(&self, tensors: &[Tensor], root: usize) -> Result<Work> {
        self.submit(Operation::BroadcastCoalesced { tensors: tensors.to_vec(), root })
    }
}
