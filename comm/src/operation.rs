//! What can be asked of a communicator, as data.

use candle_core::Tensor;

use crate::{Error, Result, fingerprint};

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

impl Operation {
    /// The name of the method that makes it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce { .. } => "all_reduce",
            Operation::Reduce { .. } => "reduce",
            Operation::Broadcast { .. } => "broadcast",
            Operation::AllGather { .. } => "all_gather",
            Operation::ReduceScatter { .. } => "reduce_scatter",
            Operation::Barrier => "barrier",
            Operation::Send { .. } => "send",
            Operation::Recv { .. } => "recv",
        }
    }

    /// Finds the caller's mistakes, before any rank is told of the call.
    pub(crate) fn validate(&self, rank: usize, world_size: usize) -> Result<()> {
        for tensor in self.tensors() {
            self.check_tensor(tensor)?;
        }
        match self {
            Operation::AllReduce { tensor, op } => self.check_reduce(tensor, *op),
            Operation::Reduce { tensor, op, root } => {
                self.check_rank(*root, world_size)?;
                self.check_reduce(tensor, *op)
            }
            Operation::Broadcast { root, .. } => self.check_rank(*root, world_size),
            Operation::AllGather { output, input } => self.check_pair("output", output, input, world_size),
            Operation::ReduceScatter { output, input, op } => {
                self.check_pair("input", input, output, world_size)?;
                self.check_reduce(input, *op)
            }
            Operation::Barrier => Ok(()),
            Operation::Send { to: peer, .. } | Operation::Recv { from: peer, .. } => {
                self.check_rank(*peer, world_size)?;
                if *peer == rank {
                    return Err(Error::invalid(
                        self.name(),
                        format!("rank {peer}"),
                        "a rank cannot exchange messages with itself",
                    ));
                }
                Ok(())
            }
        }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let (first, second) = match self {
            Operation::AllReduce { tensor, .. }
            | Operation::Reduce { tensor, .. }
            | Operation::Broadcast { tensor, .. }
            | Operation::Send { tensor, .. }
            | Operation::Recv { tensor, .. } => (Some(tensor), None),
            Operation::AllGather { output, input } | Operation::ReduceScatter { output, input, .. } => {
                (Some(output), Some(input))
            }
            Operation::Barrier => (None, None),
        };
        first.into_iter().chain(second)
    }

    fn check_tensor(&self, tensor: &Tensor) -> Result<()> {
        let operation = || self.name().to_string();
        if !fingerprint::supports(tensor.dtype()) {
            let help = "use f64, f32, f16, bf16, u8, u32 or i64".into();
            return Err(Error::UnsupportedDtype { operation: operation(), dtype: tensor.dtype(), help });
        }
        if !tensor.device().is_cpu() {
            return Err(Error::invalid(
                operation(),
                "a tensor that is not on the CPU",
                "move it with `to_device(&Device::Cpu)`",
            ));
        }
        if !tensor.is_contiguous() {
            let got = format!("a tensor of shape {:?} with strides {:?}", tensor.dims(), tensor.stride());
            return Err(Error::invalid(
                operation(),
                got,
                "it is written in place and must be contiguous: call `contiguous()` first",
            ));
        }
        Ok(())
    }

    fn check_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        if op == ReduceOp::Avg && !tensor.dtype().is_float() {
            let help = "an average of integers is not defined: use ReduceOp::Sum".into();
            return Err(Error::UnsupportedDtype {
                operation: self.name().into(),
                dtype: tensor.dtype(),
                help,
            });
        }
        Ok(())
    }

    fn check_rank(&self, rank: usize, world_size: usize) -> Result<()> {
        if rank >= world_size {
            return Err(Error::RankOutOfRange { operation: self.name().into(), rank, world_size });
        }
        Ok(())
    }

    fn check_pair(&self, what: &'static str, whole: &Tensor, part: &Tensor, world_size: usize) -> Result<()> {
        if whole.dtype() != part.dtype() {
            let got = format!("{:?} and {:?}", whole.dtype(), part.dtype());
            return Err(Error::invalid(self.name(), got, "input and output must have the same dtype"));
        }
        let (expected, got) = (part.elem_count() * world_size, whole.elem_count());
        if expected != got {
            return Err(Error::ElementCount { operation: self.name().into(), what, expected, got });
        }
        Ok(())
    }
}
