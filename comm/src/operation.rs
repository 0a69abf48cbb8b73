//! What can be asked of a communicator, as data.

use candle_core::{DType, Tensor};

use crate::{Error, Result};

/// How elements of several ranks become one.
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

/// One communication among the ranks of a group. Tensors are written in place and must be contiguous.
///
/// Each variant has a method of the same name on [`crate::Communicator`], which is what most code calls.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Operation {
    /// Every rank's `tensor` becomes the reduction of all of them.
    AllReduce {
        /// Same shape and dtype on every rank.
        tensor: Tensor,
        /// How to combine.
        op: ReduceOp,
    },
    /// The tensor of rank `root` becomes the reduction of all; the others keep theirs.
    Reduce {
        /// Same shape and dtype on every rank.
        tensor: Tensor,
        /// How to combine.
        op: ReduceOp,
        /// Who gets the result.
        root: usize,
    },
    /// Every rank's `tensor` becomes that of rank `root`.
    Broadcast {
        /// Same shape and dtype on every rank.
        tensor: Tensor,
        /// Whose values are sent.
        root: usize,
    },
    /// Every rank's `output` becomes the inputs of all ranks, one after the other.
    AllGather {
        /// `world_size` times the elements of `input`.
        output: Tensor,
        /// Same element count on every rank.
        input: Tensor,
    },
    /// Rank r's `output` becomes the r-th of `world_size` equal parts of the reduction of all inputs.
    ReduceScatter {
        /// A `world_size`-th of the elements of `input`.
        output: Tensor,
        /// Same element count on every rank.
        input: Tensor,
        /// How to combine.
        op: ReduceOp,
    },
    /// No rank goes on before all have come here.
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
        /// Where to put it.
        tensor: Tensor,
        /// The sender.
        from: usize,
    },
}
