//! Traffic statistics of operations that a library moves. The library does not report its bytes, so each operation counts
//! as what the best algorithm for large tensors would move.

use candle_core::Tensor;

use crate::{Message, Operation};

/// Returns the bytes that `rank` sends and receives.
pub(crate) fn operation_bytes(operation: &Operation, rank: usize, world_size: usize) -> (u64, u64) {
    let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
    let others = |bytes: usize| bytes * (world_size - 1) / world_size;
    let alone = world_size == 1;
    let (sent, received) = match operation {
        _ if alone => (0, 0),
        Operation::AllReduce { tensor, .. } => (2 * others(bytes(tensor)), 2 * others(bytes(tensor))),
        Operation::AllReduceCoalesced { tensors, .. } => {
            let whole = others(tensors.iter().map(bytes).sum());
            (2 * whole, 2 * whole)
        }
        Operation::Reduce { tensor, root, .. } => one_way(rank != *root, bytes(tensor)),
        Operation::Broadcast { tensor, root } => one_way(rank == *root, bytes(tensor)),
        Operation::BroadcastCoalesced { tensors, root } => {
            one_way(rank == *root, tensors.iter().map(bytes).sum())
        }
        Operation::AllGather { output, input, .. } => (others(bytes(output)), bytes(output) - bytes(input)),
        Operation::ReduceScatter { output, input, .. } => {
            (bytes(input) - bytes(output), others(bytes(input)))
        }
        Operation::Gather { output, input, .. } => match output {
            Some(output) => (0, bytes(output) - bytes(input)),
            None => (bytes(input), 0),
        },
        Operation::Scatter { output, input, .. } => match input {
            Some(input) => (bytes(input) - bytes(output), 0),
            None => (0, bytes(output)),
        },
        Operation::AllToAll { output, input, output_counts, input_counts } => {
            let size = input.dtype().size_in_bytes();
            let rest = |tensor: &Tensor, counts: &Option<Vec<usize>>| match counts {
                Some(counts) => bytes(tensor) - counts[rank] * size,
                None => others(bytes(tensor)),
            };
            (rest(input, input_counts), rest(output, output_counts))
        }
        Operation::Send { tensor, .. } => (bytes(tensor), 0),
        Operation::Recv { tensor, .. } => (0, bytes(tensor)),
        Operation::Batch { messages } => {
            messages.iter().fold((0, 0), |(sent, received), message| match message {
                Message::Send { tensor, .. } => (sent + bytes(tensor), received),
                Message::Recv { tensor, .. } => (sent, received + bytes(tensor)),
            })
        }
        Operation::Barrier => (0, 0),
    };
    (sent as u64, received as u64)
}

/// Returns (sent, received) for a rank that sends `bytes` and receives nothing, or the other way round.
fn one_way(sends: bool, bytes: usize) -> (usize, usize) {
    if sends { (bytes, 0) } else { (0, bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use candle_core::{DType, Device};

    #[test]
    fn a_ring_sends_all_but_one_part_twice() {
        let tensor = Tensor::zeros(12, DType::F32, &Device::Cpu).unwrap();
        let operation = Operation::AllReduce { tensor, op: ReduceOp::Sum };
        assert_eq!(
            (operation_bytes(&operation, 0, 4), operation_bytes(&operation, 0, 1)),
            ((72, 72), (0, 0))
        );
    }
}
