//! Several tensors in one operation.

use candle_core::{DType, Tensor};
use comm::{Error, Message, ReduceOp, Work};

use crate::Backend;
use crate::cases::{WORLD_SIZES, lengths};
use crate::reference::{DTYPES, OPS, assert_equal, input, reduced, value};

/// Every rank sends two tensors to each other rank, and receives two. The order of its messages depends on the rank.
pub(crate) fn rings(backend: &dyn Backend) {
    for world_size in WORLD_SIZES {
        backend.run(world_size, &|comm| {
            let rank = comm.rank();
            for dtype in DTYPES {
                for len in lengths(world_size) {
                    let mut messages = Vec::new();
                    let mut received = Vec::new();
                    for peer in (0..world_size).filter(|peer| *peer != rank) {
                        for len in [len, len + 3] {
                            let tensor = input(rank, len, ReduceOp::Sum, dtype);
                            messages.push(Message::Send { tensor, to: peer });
                            let tensor = Tensor::zeros(len, dtype, &crate::device())?;
                            messages.push(Message::Recv { tensor: tensor.clone(), from: peer });
                            received.push((peer, tensor));
                        }
                    }
                    if rank % 2 == 1 {
                        // The order of the messages to one peer, and of those from one, must not change.
                        messages.sort_by_key(|message| matches!(message, Message::Recv { .. }));
                    }
                    comm.batch(messages)?.wait()?;
                    for (peer, tensor) in received {
                        let expected =
                            (0..tensor.elem_count()).map(|index| value(peer, index, ReduceOp::Sum));
                        assert_equal(&tensor, expected, &format!("{dtype:?} {len} from {peer}"));
                    }
                }
            }
            Ok(())
        });
    }
}

/// Rank 1 answers the second of two large messages, each received by a single call, while rank 0 sends and receives in
/// one batch.
pub(crate) fn with_single_messages(backend: &dyn Backend) {
    let len = 2_000_000;
    backend.run(2, &|comm| {
        let tensor = |fill: f32| Tensor::full(fill, len, &crate::device());
        let (a, b) = (tensor(comm.rank() as f32)?, tensor(10.0 + comm.rank() as f32)?);
        let got = tensor(-1.0)?;
        if comm.rank() == 0 {
            let receive = Message::Recv { tensor: got.clone(), from: 1 };
            let sends = [a, b].map(|tensor| Message::Send { tensor, to: 1 });
            comm.batch([receive].into_iter().chain(sends).collect())?.wait()?;
            assert_eq!(got.to_vec1::<f32>()?, vec![11.0; len]);
        } else {
            for expected in [0.0, 10.0] {
                comm.recv(&got, 0)?.wait()?;
                assert_eq!(got.to_vec1::<f32>()?, vec![expected; len]);
            }
            comm.send(&b, 0)?.wait()?;
        }
        comm.batch(Vec::new())?.wait()?;
        comm.barrier()?.wait()
    });
}

pub(crate) fn coalesced(backend: &dyn Backend) {
    for world_size in WORLD_SIZES {
        backend.run(world_size, &|comm| {
            let rank = comm.rank();
            for dtype in DTYPES {
                for op in OPS.into_iter().filter(|op| *op != ReduceOp::Avg || dtype.is_float()) {
                    // As in the grid of the other collectives, the long ones with one op.
                    let long = (op == ReduceOp::Sum).then(|| vec![9000, 1, 70_001]);
                    for lengths in [vec![], vec![0, 0], vec![3, 0, 1, 1023, 1]].into_iter().chain(long) {
                        let inputs = || lengths.iter().map(|len| input(rank, *len, op, dtype));
                        let tensors: Vec<Tensor> = inputs().collect();
                        comm.all_reduce_coalesced(&tensors, op)?.wait()?;
                        for tensor in &tensors {
                            let expected = (0..tensor.elem_count()).map(|i| reduced(world_size, i, op));
                            assert_equal(tensor, expected, &format!("{dtype:?} {op:?} {lengths:?}"));
                        }
                        let tensors: Vec<Tensor> = inputs().collect();
                        let root = lengths.len() % world_size;
                        comm.broadcast_coalesced(&tensors, root)?.wait()?;
                        for tensor in &tensors {
                            let expected = (0..tensor.elem_count()).map(|i| value(root, i, op));
                            assert_equal(tensor, expected, &format!("{dtype:?} {lengths:?}"));
                        }
                    }
                }
            }
            Ok(())
        });
    }
    // The same number of elements in all, divided differently.
    backend.run(2, &|comm| {
        let lengths = if comm.rank() == 0 { [1, 2] } else { [2, 1] };
        let tensors = lengths.map(|len| input(0, len, ReduceOp::Sum, DType::F32));
        let error = comm.all_reduce_coalesced(&tensors, ReduceOp::Sum).and_then(Work::wait).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        Ok(())
    });
}
