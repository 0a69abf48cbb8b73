//! Operations of a communicator, as data.

use candle_core::Tensor;

/// How the elements of several ranks are reduced to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum over ranks.
    Sum,
    /// The mean over ranks; floats only.
    Avg,
    /// The product over ranks.
    Product,
    /// The smallest element over ranks; NaN if any is NaN.
    Min,
    /// The largest element over ranks; NaN if any is NaN.
    Max,
}

/// One communication among the ranks of a group. Tensors are written in place and must be contiguous. A written tensor
/// may overlap no other tensor of the call, with two exceptions: a rank's part may be exactly its range of the whole,
/// and a coalesced broadcast may contain a tensor twice.
///
/// Each variant has a method of the same name on [`crate::Communicator`], which is what most code calls.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Operation {
    /// Every rank's `tensor` becomes the reduction of all of them.
    AllReduce {
        /// Same shape and dtype on every rank.
        tensor: Tensor,
        /// The reduction.
        op: ReduceOp,
    },
    /// The tensor of rank `root` becomes the reduction of all; the others keep theirs.
    Reduce {
        /// Same shape and dtype on every rank.
        tensor: Tensor,
        /// The reduction.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// Every rank's `tensor` becomes that of rank `root`.
    Broadcast {
        /// Same shape and dtype on every rank.
        tensor: Tensor,
        /// The rank whose values are sent.
        root: usize,
    },
    /// Every rank's `output` becomes the inputs of all ranks, one after the other.
    AllGather {
        /// As many elements as all inputs together.
        output: Tensor,
        /// This rank's part.
        input: Tensor,
        /// The number of elements of each rank's part, the same list on every rank. `None` if all are equal.
        counts: Option<Vec<usize>>,
    },
    /// Rank r's `output` becomes the r-th part of the reduction of all inputs.
    ReduceScatter {
        /// This rank's part.
        output: Tensor,
        /// As many elements as all outputs together.
        input: Tensor,
        /// The reduction.
        op: ReduceOp,
        /// The number of elements of each rank's part, the same list on every rank. `None` if all are equal.
        counts: Option<Vec<usize>>,
    },
    /// The output of rank `root` becomes the inputs of all ranks, one after the other.
    Gather {
        /// As many elements as all inputs together. `Some` on the root, `None` elsewhere.
        output: Option<Tensor>,
        /// This rank's part.
        input: Tensor,
        /// The rank that gets the inputs.
        root: usize,
        /// The number of elements of each rank's part, the same list on every rank. `None` if all are equal.
        counts: Option<Vec<usize>>,
    },
    /// Rank r's `output` becomes the r-th part of the input of rank `root`.
    Scatter {
        /// This rank's part.
        output: Tensor,
        /// As many elements as all outputs together. `Some` on the root, `None` elsewhere.
        input: Option<Tensor>,
        /// The rank whose elements are sent.
        root: usize,
        /// The number of elements of each rank's part, the same list on every rank. `None` if all are equal.
        counts: Option<Vec<usize>>,
    },
    /// The r-th part of `output` becomes this rank's part of the input of rank r.
    AllToAll {
        /// The received parts, in the order of the ranks that send them.
        output: Tensor,
        /// The parts to send, in the order of the ranks that receive them.
        input: Tensor,
        /// The number of elements received from each rank. `None` if all parts are equal.
        output_counts: Option<Vec<usize>>,
        /// The number of elements sent to each rank. `None` if all parts are equal.
        input_counts: Option<Vec<usize>>,
    },
    /// As [`Operation::AllReduce`], for each of several tensors.
    AllReduceCoalesced {
        /// All of one dtype; the same list of element counts on every rank.
        tensors: Vec<Tensor>,
        /// The reduction.
        op: ReduceOp,
    },
    /// As [`Operation::Broadcast`], for each of several tensors.
    BroadcastCoalesced {
        /// The same list of element counts and dtypes on every rank.
        tensors: Vec<Tensor>,
        /// The rank whose values are sent.
        root: usize,
    },
    /// No rank continues before all ranks have called it.
    Barrier,
    /// Sends `tensor` to rank `to`, which must receive it.
    Send {
        /// What to send.
        tensor: Tensor,
        /// The receiver.
        to: usize,
    },
    /// Fills `tensor` with what rank `from` sends.
    Recv {
        /// The tensor to write to.
        tensor: Tensor,
        /// The sender.
        from: usize,
    },
    /// Sends and receives several tensors at the same time.
    Batch {
        /// Messages from one rank to another are sent and received in this order.
        messages: Vec<Message>,
    },
}

/// One of the messages of a batch.
#[derive(Debug, Clone)]
pub enum Message {
    /// Sends `tensor` to rank `to`, which must receive it.
    Send {
        /// What to send.
        tensor: Tensor,
        /// The receiver.
        to: usize,
    },
    /// Fills `tensor` with what rank `from` sends.
    Recv {
        /// The tensor to write to.
        tensor: Tensor,
        /// The sender.
        from: usize,
    },
}

impl Message {
    pub(crate) fn tensor(&self) -> &Tensor {
        match self {
            Message::Send { tensor, .. } | Message::Recv { tensor, .. } => tensor,
        }
    }

    fn tensor_mut(&mut self) -> &mut Tensor {
        match self {
            Message::Send { tensor, .. } | Message::Recv { tensor, .. } => tensor,
        }
    }

    pub(crate) fn peer(&self) -> usize {
        match self {
            Message::Send { to: peer, .. } | Message::Recv { from: peer, .. } => *peer,
        }
    }
}

/// Returns all tensors of an operation, borrowed or mutably borrowed.
macro_rules! tensors_of {
    ($operation:expr, $iter:ident, $of_message:path) => {
        match $operation {
            Operation::AllReduce { tensor, .. }
            | Operation::Reduce { tensor, .. }
            | Operation::Broadcast { tensor, .. }
            | Operation::Send { tensor, .. }
            | Operation::Recv { tensor, .. } => vec![tensor],
            Operation::AllGather { output, input, .. }
            | Operation::ReduceScatter { output, input, .. }
            | Operation::AllToAll { output, input, .. } => vec![output, input],
            Operation::Gather { output, input, .. } => output.$iter().chain([input]).collect(),
            Operation::Scatter { output, input, .. } => input.$iter().chain([output]).collect(),
            Operation::AllReduceCoalesced { tensors, .. } | Operation::BroadcastCoalesced { tensors, .. } => {
                tensors.$iter().collect()
            }
            Operation::Batch { messages } => messages.$iter().map($of_message).collect(),
            Operation::Barrier => Vec::new(),
        }
    };
}

impl Operation {
    /// Returns the name of the communicator's method for this operation.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce { .. } => "all_reduce",
            Operation::Reduce { .. } => "reduce",
            Operation::Broadcast { .. } => "broadcast",
            Operation::AllGather { .. } => "all_gather",
            Operation::ReduceScatter { .. } => "reduce_scatter",
            Operation::Gather { .. } => "gather",
            Operation::Scatter { .. } => "scatter",
            Operation::AllToAll { .. } => "all_to_all",
            Operation::AllReduceCoalesced { .. } => "all_reduce_coalesced",
            Operation::BroadcastCoalesced { .. } => "broadcast_coalesced",
            Operation::Batch { .. } => "batch",
            Operation::Barrier => "barrier",
            Operation::Send { .. } => "send",
            Operation::Recv { .. } => "recv",
        }
    }

    /// Returns the operation on the same elements, with its tensors detached from any autograd graph.
    pub(crate) fn detached(mut self) -> Self {
        self.tensors_mut().into_iter().for_each(|tensor| *tensor = tensor.detach());
        self
    }

    fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        tensors_of!(self, iter_mut, Message::tensor_mut)
    }

    /// Returns the tensors that it reads or writes.
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        tensors_of!(self, iter, Message::tensor)
    }
}
