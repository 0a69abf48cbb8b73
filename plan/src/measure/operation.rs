//! The operations that are measured: their tensors, bus factors and memory.

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Message, Operation, ReduceOp, Result};

/// An operation of the communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measured {
    /// Sums a buffer over all ranks.
    AllReduce,
    /// Puts the parts of all ranks together on each of them.
    AllGather,
    /// Sums a buffer over all ranks and gives each its part.
    ReduceScatter,
    /// Sends rank 0's buffer to all.
    Broadcast,
    /// Sums a buffer over all ranks on rank 0.
    Reduce,
    /// Puts the parts of all ranks together on rank 0.
    Gather,
    /// Gives each rank its part of rank 0's buffer.
    Scatter,
    /// Exchanges a part with each rank.
    AllToAll,
    /// Sends a buffer to the next rank and receives one from the one before.
    SendRecv,
    /// Waits for all ranks; has no size.
    Barrier,
}

impl Measured {
    /// All operations.
    pub const ALL: [Self; 10] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::SendRecv,
        Self::Barrier,
    ];

    /// Returns the name: PyTorch's, and that of `comm-bench --ops`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::SendRecv => "send_recv",
            Self::Barrier => "barrier",
        }
    }

    /// Returns the operation of a [`name`](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }

    /// Returns what the operation does, in a few words.
    pub fn description(self) -> &'static str {
        match self {
            Self::AllReduce => "Sums a buffer over all ranks",
            Self::AllGather => "Puts the parts of all ranks together on each of them",
            Self::ReduceScatter => "Sums a buffer over all ranks and gives each its part",
            Self::Broadcast => "Sends rank 0's buffer to all",
            Self::Reduce => "Sums a buffer over all ranks on rank 0",
            Self::Gather => "Puts the parts of all ranks together on rank 0",
            Self::Scatter => "Gives each rank its part of rank 0's buffer",
            Self::AllToAll => "Exchanges a part with each rank",
            Self::SendRecv => "Sends a buffer to the next rank and receives one from the one before",
            Self::Barrier => "Waits for all ranks; has no size",
        }
    }

    /// Returns the bytes a bus carries per byte of the buffer, as in nccl-tests: what the slowest link carries in an
    /// optimal implementation of the operation.
    pub(crate) fn bus_factor(self, world_size: usize) -> f64 {
        let ranks = world_size as f64;
        match self {
            Self::AllReduce => 2.0 * (ranks - 1.0) / ranks,
            Self::AllGather | Self::ReduceScatter | Self::Gather | Self::Scatter | Self::AllToAll => {
                (ranks - 1.0) / ranks
            }
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
            Self::Barrier => 0.0,
        }
    }

    /// Returns how many whole buffers all ranks together allocate, with each rank's part counted as its fraction.
    pub fn buffers(self, world_size: usize) -> f64 {
        let ranks = world_size as f64;
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce => ranks,
            Self::AllGather | Self::ReduceScatter => ranks + 1.0,
            Self::Gather | Self::Scatter => 2.0,
            Self::AllToAll | Self::SendRecv => 2.0 * ranks,
            Self::Barrier => 0.0,
        }
    }

    /// Creates the operation with this rank's tensors. `bytes` is the size of the whole buffer: for operations with
    /// parts, of the parts of all ranks. All tensors are filled, so that no page fault occurs during the measurement.
    ///
    /// # Errors
    /// Tensors that do not fit into memory.
    pub fn operation(
        self,
        comm: &dyn Communicator,
        bytes: usize,
        (dtype, device): (DType, &Device),
    ) -> Result<Operation> {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let len = bytes / dtype.size_in_bytes();
        let filled = |len: usize| Tensor::ones(len, dtype, device);
        let (counts, even) = parts(len, world_size);
        let own = counts[rank];
        let counts = (!even).then_some(counts);
        let (op, root) = (ReduceOp::Sum, 0);
        let at_root = |len: usize| (rank == root).then(|| filled(len)).transpose();
        Ok(match self {
            Self::AllReduce => Operation::AllReduce { tensor: filled(len)?, op },
            Self::AllGather => Operation::AllGather { output: filled(len)?, input: filled(own)?, counts },
            Self::ReduceScatter => {
                Operation::ReduceScatter { output: filled(own)?, input: filled(len)?, op, counts }
            }
            Self::Broadcast => Operation::Broadcast { tensor: filled(len)?, root },
            Self::Reduce => Operation::Reduce { tensor: filled(len)?, op, root },
            Self::Gather => Operation::Gather { output: at_root(len)?, input: filled(own)?, root, counts },
            Self::Scatter => Operation::Scatter { output: filled(own)?, input: at_root(len)?, root, counts },
            Self::AllToAll => Self::all_to_all(rank, world_size, len, || filled(len))?,
            Self::SendRecv => {
                let (next, before) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
                let (send, recv) = (filled(len)?, filled(len)?);
                Operation::Batch {
                    messages: vec![
                        Message::Send { tensor: send, to: next },
                        Message::Recv { tensor: recv, from: before },
                    ],
                }
            }
            Self::Barrier => Operation::Barrier,
        })
    }

    /// Creates an all-to-all in which each pair of ranks exchanges equal amounts.
    fn all_to_all(
        rank: usize,
        world_size: usize,
        len: usize,
        filled: impl Fn() -> candle_core::Result<Tensor>,
    ) -> Result<Operation> {
        let even = len.is_multiple_of(world_size);
        // Symmetric: the same for both ranks of a pair.
        let counts: Vec<usize> = (0..world_size)
            .map(|peer| len / world_size + usize::from((rank + peer) % world_size < len % world_size))
            .collect();
        Ok(Operation::AllToAll {
            output: filled()?,
            input: filled()?,
            output_counts: (!even).then(|| counts.clone()),
            input_counts: (!even).then_some(counts),
        })
    }
}

/// Returns the number of elements of each rank's part, and whether all parts are equal.
fn parts(len: usize, world_size: usize) -> (Vec<usize>, bool) {
    let (each, rest) = (len / world_size, len % world_size);
    ((0..world_size).map(|rank| each + usize::from(rank < rest)).collect(), rest == 0)
}

#[cfg(test)]
mod tests {
    use comm::Local;

    use super::*;

    #[test]
    fn every_operation_runs_with_any_number_of_ranks_and_elements() {
        for world_size in [1, 2, 3, 5] {
            for len in [0, 1, 7, 30] {
                for measured in Measured::ALL {
                    // A rank cannot send to itself.
                    if world_size == 1 && measured == Measured::SendRecv {
                        continue;
                    }
                    Local::run(world_size, |comm| {
                        let operation =
                            measured.operation(comm, len * 4, (DType::F32, &Device::Cpu)).unwrap();
                        comm.run(operation).map_err(|error| panic!("{}: {error}", measured.name()))
                    })
                    .unwrap();
                }
            }
        }
    }

    #[test]
    fn bus_bandwidth_is_counted_as_nccl_tests_do() {
        assert_eq!(Measured::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Measured::AllGather.bus_factor(4), 0.75);
        assert_eq!(Measured::Broadcast.bus_factor(4), 1.0);
    }
}
