//! Translation of operations into NCCL calls: pure data, computed without touching a device.

use std::collections::BTreeSet;

use candle_core::Tensor;

use crate::{Message, Operation, ReduceOp};

/// A position in one of an operation's tensors: the index in [`Operation::tensors`], and the first element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TensorOffset {
    pub(super) tensor: usize,
    pub(super) first: usize,
}

/// An NCCL call. All calls of an operation form one NCCL group, in which none waits for another.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum NcclCall {
    AllReduce {
        at: TensorOffset,
        count: usize,
        op: ReduceOp,
    },
    /// `into` is Some on the root only.
    Reduce {
        from: TensorOffset,
        into: Option<TensorOffset>,
        count: usize,
        op: ReduceOp,
        root: usize,
    },
    Broadcast {
        from: Option<TensorOffset>,
        into: TensorOffset,
        count: usize,
        root: usize,
    },
    AllGather {
        from: TensorOffset,
        into: TensorOffset,
        count: usize,
    },
    ReduceScatter {
        from: TensorOffset,
        into: TensorOffset,
        count: usize,
        op: ReduceOp,
    },
    Send {
        from: TensorOffset,
        count: usize,
        to: usize,
    },
    Receive {
        into: TensorOffset,
        count: usize,
        from: usize,
    },
}

/// Returns the calls of one rank. NCCL supports equal parts only: unequal parts take one call for each part.
pub(super) fn of(operation: &Operation, rank: usize, world_size: usize) -> Vec<NcclCall> {
    let mut calls = Vec::new();
    match operation {
        Operation::AllReduce { tensor, op } => all_reduce(&mut calls, std::slice::from_ref(tensor), *op),
        Operation::AllReduceCoalesced { tensors, op } => all_reduce(&mut calls, tensors, *op),
        Operation::Broadcast { tensor, root } => {
            broadcast(&mut calls, std::slice::from_ref(tensor), rank, *root)
        }
        Operation::BroadcastCoalesced { tensors, root } => broadcast(&mut calls, tensors, rank, *root),
        Operation::Reduce { tensor, op, root } => {
            let at = place(0, 0);
            let into = (rank == *root).then_some(at);
            calls.push(NcclCall::Reduce { from: at, into, count: tensor.elem_count(), op: *op, root: *root });
        }
        Operation::AllGather { input, counts, .. } => {
            all_gather(&mut calls, input.elem_count(), counts.as_deref(), rank);
        }
        Operation::ReduceScatter { output, op, counts, .. } => {
            reduce_scatter(&mut calls, output.elem_count(), *op, counts.as_deref(), rank);
        }
        Operation::Gather { output, input, root, counts } => {
            let (own, first) = (input.elem_count(), usize::from(output.is_some()));
            calls.push(NcclCall::Send { from: place(first, 0), count: own, to: *root });
            if output.is_some() {
                for (from, part) in parts(counts.as_deref(), own, world_size) {
                    calls.push(NcclCall::Receive { into: place(0, part.start), count: part.len(), from });
                }
            }
        }
        Operation::Scatter { output, input, root, counts } => {
            let (own, first) = (output.elem_count(), usize::from(input.is_some()));
            if input.is_some() {
                for (to, part) in parts(counts.as_deref(), own, world_size) {
                    calls.push(NcclCall::Send { from: place(0, part.start), count: part.len(), to });
                }
            }
            calls.push(NcclCall::Receive { into: place(first, 0), count: own, from: *root });
        }
        Operation::AllToAll { output, input, output_counts, input_counts } => {
            let share = |tensor: &Tensor| tensor.elem_count() / world_size;
            for (to, part) in parts(input_counts.as_deref(), share(input), world_size) {
                calls.push(NcclCall::Send { from: place(1, part.start), count: part.len(), to });
            }
            for (from, part) in parts(output_counts.as_deref(), share(output), world_size) {
                calls.push(NcclCall::Receive { into: place(0, part.start), count: part.len(), from });
            }
        }
        _ => messages(&mut calls, operation),
    }
    calls.retain(|call| call.count() > 0);
    if world_size == 1 {
        calls.iter_mut().for_each(NcclCall::sum_instead_of_averaging);
    }
    calls
}

/// Returns calls that exchange a byte with each rank that `calls` send to or receive from and that is not in `met`, to
/// which they are added. NCCL connects two ranks in the first group that needs it, and fails if that group sends and
/// receives on one of them but not on the other: these calls, at the start of the first messages, make both alike. The
/// bytes are those of tensor `at`: one to send, then one for each new rank.
pub(super) fn greetings(
    calls: &[NcclCall],
    rank: usize,
    met: &mut BTreeSet<usize>,
    at: usize,
) -> Vec<NcclCall> {
    let mut greetings = Vec::new();
    for call in calls {
        let (NcclCall::Send { to: other, .. } | NcclCall::Receive { from: other, .. }) = *call else {
            continue;
        };
        if other != rank && met.insert(other) {
            let own = 1 + greetings.len() / 2;
            greetings.push(NcclCall::Send { from: place(at, 0), count: 1, to: other });
            greetings.push(NcclCall::Receive { into: place(at, own), count: 1, from: other });
        }
    }
    greetings
}

impl NcclCall {
    /// The same where there is one rank. There, NCCL (2.28.3) averages into another tensor without the last elements, if
    /// its blocks do not divide their number.
    fn sum_instead_of_averaging(&mut self) {
        if let NcclCall::AllReduce { op, .. }
        | NcclCall::Reduce { op, .. }
        | NcclCall::ReduceScatter { op, .. } = self
            && *op == ReduceOp::Avg
        {
            *op = ReduceOp::Sum;
        }
    }

    fn count(&self) -> usize {
        match self {
            NcclCall::AllReduce { count, .. }
            | NcclCall::Reduce { count, .. }
            | NcclCall::Broadcast { count, .. }
            | NcclCall::AllGather { count, .. }
            | NcclCall::ReduceScatter { count, .. }
            | NcclCall::Send { count, .. }
            | NcclCall::Receive { count, .. } => *count,
        }
    }

    /// Returns the name of the NCCL function.
    pub(super) fn name(&self) -> &'static str {
        match self {
            NcclCall::AllReduce { .. } => "ncclAllReduce",
            NcclCall::Reduce { .. } => "ncclReduce",
            NcclCall::Broadcast { .. } => "ncclBroadcast",
            NcclCall::AllGather { .. } => "ncclAllGather",
            NcclCall::ReduceScatter { .. } => "ncclReduceScatter",
            NcclCall::Send { .. } => "ncclSend",
            NcclCall::Receive { .. } => "ncclRecv",
        }
    }
}

fn place(tensor: usize, first: usize) -> TensorOffset {
    TensorOffset { tensor, first }
}

fn all_reduce(calls: &mut Vec<NcclCall>, tensors: &[Tensor], op: ReduceOp) {
    let call = |(index, tensor): (usize, &Tensor)| NcclCall::AllReduce {
        at: place(index, 0),
        count: tensor.elem_count(),
        op,
    };
    calls.extend(tensors.iter().enumerate().map(call));
}

fn broadcast(calls: &mut Vec<NcclCall>, tensors: &[Tensor], rank: usize, root: usize) {
    let call = |(index, tensor): (usize, &Tensor)| {
        let into = place(index, 0);
        NcclCall::Broadcast { from: (rank == root).then_some(into), into, count: tensor.elem_count(), root }
    };
    calls.extend(tensors.iter().enumerate().map(call));
}

/// Adds the calls for messages between two ranks; none for a barrier, which needs no NCCL.
fn messages(calls: &mut Vec<NcclCall>, operation: &Operation) {
    match operation {
        Operation::Send { tensor, to } => {
            calls.push(NcclCall::Send { from: place(0, 0), count: tensor.elem_count(), to: *to });
        }
        Operation::Recv { tensor, from } => {
            calls.push(NcclCall::Receive { into: place(0, 0), count: tensor.elem_count(), from: *from });
        }
        Operation::Batch { messages } => {
            for (index, message) in messages.iter().enumerate() {
                let (at, count) = (place(index, 0), message.tensor().elem_count());
                calls.push(match message {
                    Message::Send { to, .. } => NcclCall::Send { from: at, count, to: *to },
                    Message::Recv { from, .. } => NcclCall::Receive { into: at, count, from: *from },
                });
            }
        }
        _ => {}
    }
}

/// The operation's tensors are output (0) and input (1).
fn all_gather(calls: &mut Vec<NcclCall>, own: usize, counts: Option<&[usize]>, rank: usize) {
    let Some(counts) = counts else {
        return calls.push(NcclCall::AllGather { from: place(1, 0), into: place(0, 0), count: own });
    };
    for (root, part) in parts(Some(counts), own, counts.len()) {
        let from = (rank == root).then_some(place(1, 0));
        calls.push(NcclCall::Broadcast { from, into: place(0, part.start), count: part.len(), root });
    }
}

/// The operation's tensors are output (0) and input (1).
fn reduce_scatter(
    calls: &mut Vec<NcclCall>,
    own: usize,
    op: ReduceOp,
    counts: Option<&[usize]>,
    rank: usize,
) {
    let Some(counts) = counts else {
        return calls.push(NcclCall::ReduceScatter { from: place(1, 0), into: place(0, 0), count: own, op });
    };
    for (root, part) in parts(Some(counts), own, counts.len()) {
        let into = (rank == root).then_some(place(0, 0));
        calls.push(NcclCall::Reduce { from: place(1, part.start), into, count: part.len(), op, root });
    }
}

/// Returns each rank's part of a whole tensor: by `counts`, or, where these are None, `own` elements each.
fn parts(
    counts: Option<&[usize]>,
    own: usize,
    world_size: usize,
) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    let mut next = 0;
    (0..world_size).map(move |rank| {
        let start = next;
        next += counts.map_or(own, |counts| counts[rank]);
        (rank, start..next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn tensor(len: usize) -> Tensor {
        Tensor::zeros(len, DType::F32, &Device::Cpu).unwrap()
    }

    #[test]
    fn uneven_parts_are_a_call_each_and_empty_ones_none() {
        let counts = Some(vec![2, 0, 3]);
        let operation = Operation::AllGather { output: tensor(5), input: tensor(3), counts };
        let expected = vec![
            NcclCall::Broadcast { from: None, into: place(0, 0), count: 2, root: 0 },
            NcclCall::Broadcast { from: Some(place(1, 0)), into: place(0, 2), count: 3, root: 2 },
        ];
        assert_eq!(of(&operation, 2, 3), expected);
    }

    #[test]
    fn ranks_greet_each_other_once() {
        let message = |to| NcclCall::Send { from: place(0, 0), count: 7, to };
        let mut met = BTreeSet::from([3]);
        let calls = [message(2), message(3), message(0), message(2), message(1)];
        let expected = [
            NcclCall::Send { from: place(5, 0), count: 1, to: 2 },
            NcclCall::Receive { into: place(5, 1), count: 1, from: 2 },
            NcclCall::Send { from: place(5, 0), count: 1, to: 1 },
            NcclCall::Receive { into: place(5, 2), count: 1, from: 1 },
        ];
        assert_eq!(greetings(&calls, 0, &mut met, 5), expected);
        assert_eq!(greetings(&calls, 0, &mut met, 5), []);
    }

    #[test]
    fn one_rank_averages_nothing() {
        let operation =
            |op| Operation::ReduceScatter { output: tensor(5), input: tensor(5), op, counts: None };
        assert_eq!(of(&operation(ReduceOp::Avg), 0, 1), of(&operation(ReduceOp::Sum), 0, 1));
        assert_ne!(of(&operation(ReduceOp::Avg), 0, 2), of(&operation(ReduceOp::Sum), 0, 2));
        assert_ne!(of(&operation(ReduceOp::Max), 0, 1), of(&operation(ReduceOp::Sum), 0, 1));
    }

    #[test]
    fn a_root_sends_to_itself_too() {
        let operation =
            Operation::Scatter { output: tensor(2), input: Some(tensor(4)), root: 1, counts: None };
        let expected = vec![
            NcclCall::Send { from: place(0, 0), count: 2, to: 0 },
            NcclCall::Send { from: place(0, 2), count: 2, to: 1 },
            NcclCall::Receive { into: place(1, 0), count: 2, from: 1 },
        ];
        assert_eq!(of(&operation, 1, 2), expected);
        let operation = Operation::Scatter { output: tensor(2), input: None, root: 1, counts: None };
        assert_eq!(of(&operation, 0, 2), [NcclCall::Receive { into: place(0, 0), count: 2, from: 1 }]);
    }

    #[test]
    fn every_send_has_its_receive() {
        let count = |from: usize, to: usize| (from + 2 * to) % 3;
        let calls = |rank: usize| {
            let goes: Vec<usize> = (0..3).map(|to| count(rank, to)).collect();
            let comes: Vec<usize> = (0..3).map(|from| count(from, rank)).collect();
            let (output, input) = (tensor(comes.iter().sum()), tensor(goes.iter().sum()));
            let (output_counts, input_counts) = (Some(comes), Some(goes));
            of(&Operation::AllToAll { output, input, output_counts, input_counts }, rank, 3)
        };
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for rank in 0..3 {
            for call in calls(rank) {
                match call {
                    NcclCall::Send { count, to, .. } => sent.push((rank, to, count)),
                    NcclCall::Receive { count, from, .. } => received.push((from, rank, count)),
                    other => panic!("{other:?}"),
                }
            }
        }
        received.sort_unstable();
        assert_eq!(sent, received);
    }
}
