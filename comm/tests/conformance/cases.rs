//! Cases that any backend must pass.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Tensor};
use comm::{Communicator, Error, ReduceOp, Result};

use crate::Backend;
use crate::reference::{DTYPES, OPS, assert_equal, input, reduced, value, values};

pub(crate) const WORLD_SIZES: [usize; 7] = [1, 2, 3, 4, 5, 8, 9];

/// 0, 1, fewer than ranks, not divisible, more than one segment, enough for the algorithm of large tensors.
pub(crate) fn lengths(world_size: usize) -> Vec<usize> {
    let mut lengths = vec![0, 1, world_size - 1, 4 * world_size + 1, 1023, 70_001];
    lengths.dedup();
    lengths
}

/// Runs `body` for every world size, on each rank with every dtype, op and length that make sense together.
pub(crate) fn grid(
    backend: &dyn Backend,
    body: impl Fn(&dyn Communicator, DType, ReduceOp, usize) -> Result<()> + Sync,
) {
    for world_size in WORLD_SIZES {
        backend.run(world_size, &|comm| {
            for dtype in DTYPES {
                for op in OPS.into_iter().filter(|op| *op != ReduceOp::Avg || dtype.is_float()) {
                    // The longest one only with few combinations: it tests the transport.
                    for len in lengths(world_size) {
                        if len < 70_000 || op == ReduceOp::Sum {
                            body(comm, dtype, op, len)?;
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

/// Like [`grid`], for operations that move bytes and compute nothing: with one op, and the longest one with one dtype of
/// each size.
pub(crate) fn grid_of_moves(
    backend: &dyn Backend,
    body: impl Fn(&dyn Communicator, DType, ReduceOp, usize) -> Result<()> + Sync,
) {
    grid(backend, |comm, dtype, op, len| {
        let is_another = matches!(dtype, DType::BF16 | DType::U32 | DType::I64) && len >= 70_000;
        if op == ReduceOp::Sum && !is_another { body(comm, dtype, op, len) } else { Ok(()) }
    });
}

pub(crate) fn all_reduce(backend: &dyn Backend) {
    grid(backend, |comm, dtype, op, len| {
        let tensor = input(comm.rank(), len, op, dtype);
        comm.all_reduce(&tensor, op)?.wait()?;
        let expected = (0..len).map(|index| reduced(comm.world_size(), index, op));
        assert_equal(&tensor, expected, &format!("{dtype:?} {op:?} {len}"));
        Ok(())
    });
}

pub(crate) fn reduce(backend: &dyn Backend) {
    grid(backend, |comm, dtype, op, len| {
        let root = len % comm.world_size();
        let tensor = input(comm.rank(), len, op, dtype);
        comm.reduce(&tensor, op, root)?.wait()?;
        let own = comm.rank() != root;
        let expected = (0..len).map(|index| {
            if own { value(comm.rank(), index, op) } else { reduced(comm.world_size(), index, op) }
        });
        assert_equal(&tensor, expected, &format!("{dtype:?} {op:?} {len}"));
        Ok(())
    });
}

pub(crate) fn broadcast(backend: &dyn Backend) {
    grid_of_moves(backend, |comm, dtype, op, len| {
        let root = (len + 1) % comm.world_size();
        let tensor = input(comm.rank(), len, op, dtype);
        comm.broadcast(&tensor, root)?.wait()?;
        assert_equal(&tensor, (0..len).map(|index| value(root, index, op)), &format!("{dtype:?} {len}"));
        Ok(())
    });
}

pub(crate) fn all_gather(backend: &dyn Backend) {
    grid_of_moves(backend, |comm, dtype, op, len| {
        let world_size = comm.world_size();
        let output = Tensor::zeros((world_size, len), dtype, &crate::device())?;
        comm.all_gather(&output, &input(comm.rank(), len, op, dtype))?.wait()?;
        let expected = (0..world_size).flat_map(|rank| (0..len).map(move |index| value(rank, index, op)));
        assert_equal(&output.flatten_all()?, expected, &format!("{dtype:?} {len}"));

        // The input may be this rank's part of the output.
        let own = input(comm.rank(), len, op, dtype);
        let output = Tensor::cat(&vec![own; world_size], 0)?;
        comm.all_gather(&output, &output.narrow(0, comm.rank() * len, len)?)?.wait()?;
        let expected = (0..world_size).flat_map(|rank| (0..len).map(move |index| value(rank, index, op)));
        assert_equal(&output, expected, &format!("in place, {dtype:?} {len}"));
        Ok(())
    });
}

pub(crate) fn reduce_scatter(backend: &dyn Backend) {
    grid(backend, |comm, dtype, op, len| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let whole = input(rank, len * world_size, op, dtype);
        let output = Tensor::zeros(len, dtype, &crate::device())?;
        comm.reduce_scatter(&output, &whole, op)?.wait()?;
        let expected = (rank * len..(rank + 1) * len).map(|index| reduced(world_size, index, op));
        assert_equal(&output, expected, &format!("{dtype:?} {op:?} {len}"));
        let untouched = (0..whole.elem_count()).map(|index| value(rank, index, op));
        assert_equal(&whole, untouched, "the input");
        Ok(())
    });
}

/// A ring of messages, several in flight, and one view in the middle of a tensor.
pub(crate) fn messages(backend: &dyn Backend) {
    for world_size in WORLD_SIZES.into_iter().skip(1) {
        backend.run(world_size, &|comm| {
            let (rank, next) = (comm.rank(), (comm.rank() + 1) % world_size);
            let previous = (rank + world_size - 1) % world_size;
            for dtype in DTYPES {
                for len in lengths(world_size) {
                    let outgoing = input(rank, len, ReduceOp::Sum, dtype);
                    let incoming = Tensor::zeros(len + 2, dtype, &crate::device())?;
                    let middle = incoming.narrow(0, 1, len)?;
                    // One rank receives first: the ring must not depend on buffers.
                    if rank == 0 {
                        comm.recv(&middle, previous)?.wait()?;
                        comm.send(&outgoing, next)?.wait()?;
                    } else {
                        comm.send(&outgoing, next)?.wait()?;
                        comm.recv(&middle, previous)?.wait()?;
                    }
                    let got = (0..len).map(|index| value(previous, index, ReduceOp::Sum));
                    assert_equal(
                        &incoming,
                        [0.0].into_iter().chain(got).chain([0.0]),
                        &format!("{dtype:?} {len}"),
                    );
                }
            }
            Ok(())
        });
    }
}

pub(crate) fn barrier(backend: &dyn Backend) {
    for world_size in WORLD_SIZES {
        let arrived = AtomicUsize::new(0);
        let ranks_are_threads = AtomicUsize::new(0);
        backend.run(world_size, &|comm| {
            ranks_are_threads.fetch_add(1, Ordering::SeqCst);
            for round in 1..=20 {
                arrived.fetch_add(1, Ordering::SeqCst);
                comm.barrier()?.wait()?;
                assert!(
                    arrived.load(Ordering::SeqCst) >= round * world_size,
                    "rank {} went ahead",
                    comm.rank()
                );
                comm.barrier()?.wait()?;
            }
            Ok(())
        });
        assert_eq!(ranks_are_threads.load(Ordering::SeqCst), world_size);
    }
}

/// Many operations submitted before any is waited for, some waited for out of order, some never.
pub(crate) fn queued(backend: &dyn Backend) {
    backend.run(3, &|comm| {
        let tensors: Vec<Tensor> =
            (0..50).map(|index| input(comm.rank(), index, ReduceOp::Sum, DType::F32)).collect();
        let mut works = Vec::new();
        for tensor in &tensors {
            works.push(comm.all_reduce(tensor, ReduceOp::Sum)?);
        }
        works.pop().unwrap().wait()?;
        assert!(
            works.iter().all(comm::Work::is_done),
            "operations run in the order in which they were submitted"
        );
        drop(works);
        for tensor in &tensors {
            let expected = (0..tensor.elem_count()).map(|index| reduced(3, index, ReduceOp::Sum));
            assert_equal(tensor, expected, "queued");
        }
        // Never waited for: it is still done before the group closes.
        let _ = comm.broadcast(&tensors[10], 2)?;
        Ok(())
    });
}

pub(crate) fn mistakes(backend: &dyn Backend) {
    backend.run(2, &|comm| {
        let tensor = Tensor::zeros((2, 3), DType::F32, &crate::device())?;
        let errors = [
            comm.broadcast(&tensor, 2).unwrap_err(),
            comm.send(&tensor, comm.rank()).unwrap_err(),
            comm.all_reduce(&tensor.t()?, ReduceOp::Sum).unwrap_err(),
            comm.all_reduce(&tensor.to_dtype(DType::U32)?, ReduceOp::Avg).unwrap_err(),
            comm.all_gather(&tensor, &tensor).unwrap_err(),
            comm.reduce_scatter(&tensor.to_dtype(DType::F64)?, &tensor, ReduceOp::Sum).unwrap_err(),
            comm.gather(if comm.rank() == 0 { None } else { Some(&tensor) }, &tensor, 0).unwrap_err(),
            comm.scatter(&tensor, if comm.rank() == 1 { Some(&tensor) } else { None }, 0).unwrap_err(),
            comm.gather_v(None, &tensor, 1 - comm.rank(), &[1, 1]).unwrap_err(),
            comm.all_gather_v(&tensor, &tensor, &[6]).unwrap_err(),
            comm.all_gather_v(&tensor, &tensor, &[usize::MAX, 7]).unwrap_err(),
            comm.all_gather_v(&tensor, &tensor, &[3, 3]).unwrap_err(),
            comm.reduce_scatter_v(&tensor, &tensor, ReduceOp::Sum, &[3, 3]).unwrap_err(),
            comm.scatter_v(&tensor, None, 1 - comm.rank(), &[5, 5]).unwrap_err(),
            comm.all_to_all(&tensor.narrow(1, 0, 1)?.contiguous()?, &tensor).unwrap_err(),
            comm.all_to_all(&tensor.narrow(0, 0, 1)?, &tensor.narrow(0, 0, 1)?).unwrap_err(),
            comm.all_to_all_v(&tensor, &tensor, &[2, 4], &[4, 2]).unwrap_err(),
            comm.all_reduce(&Tensor::zeros(6, DType::I32, &crate::device())?, ReduceOp::Sum).unwrap_err(),
        ];
        for error in errors {
            assert!(!error.is_peer_failure(), "{error}");
            assert!(!error.to_string().contains('\n'), "one line: {error}");
        }
        assert!(matches!(
            comm.broadcast(&tensor, 9),
            Err(Error::RankOutOfRange { rank: 9, world_size: 2, .. })
        ));
        comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
        assert_eq!(values(&tensor), [0.0; 6]);
        Ok(())
    });
}
