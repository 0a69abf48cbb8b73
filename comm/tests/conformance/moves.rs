//! Gather, scatter, all-to-all with equal parts; views.

use candle_core::{DType, Tensor};
use comm::ReduceOp;

use crate::Backend;
use crate::cases::grid_of_moves;
use crate::reference::{assert_equal, input, reduced, value};

pub(crate) fn gather(backend: &dyn Backend) {
    grid_of_moves(backend, |comm, dtype, op, len| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let root = len % world_size;
        let output = Tensor::zeros(len * world_size, dtype, &crate::device())?;
        let own = input(rank, len, op, dtype);
        comm.gather((rank == root).then_some(&output), &own, root)?.wait()?;
        if rank == root {
            let expected = (0..world_size).flat_map(|rank| (0..len).map(move |index| value(rank, index, op)));
            assert_equal(&output, expected, &format!("{dtype:?} {len}"));
        }
        assert_equal(&own, (0..len).map(|index| value(rank, index, op)), "the input");
        Ok(())
    });
}

pub(crate) fn scatter(backend: &dyn Backend) {
    grid_of_moves(backend, |comm, dtype, op, len| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let root = (len + 1) % world_size;
        let output = Tensor::zeros(len, dtype, &crate::device())?;
        let whole = input(root, len * world_size, op, dtype);
        comm.scatter(&output, (rank == root).then_some(&whole), root)?.wait()?;
        let expected = (rank * len..(rank + 1) * len).map(|index| value(root, index, op));
        assert_equal(&output, expected, &format!("{dtype:?} {len}"));
        Ok(())
    });
}

pub(crate) fn all_to_all(backend: &dyn Backend) {
    grid_of_moves(backend, |comm, dtype, op, len| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let whole = input(rank, len * world_size, op, dtype);
        let output = Tensor::zeros(len * world_size, dtype, &crate::device())?;
        comm.all_to_all(&output, &whole)?.wait()?;
        let part = |from: usize| (rank * len..(rank + 1) * len).map(move |index| value(from, index, op));
        assert_equal(&output, (0..world_size).flat_map(part), &format!("{dtype:?} {len}"));
        let untouched = (0..len * world_size).map(|index| value(rank, index, op));
        assert_equal(&whole, untouched, "the input");
        Ok(())
    });
}

/// Input and output are views of one storage.
pub(crate) fn views(backend: &dyn Backend) {
    backend.run(3, &|comm| {
        let (rank, len) = (comm.rank(), 1000);
        let storage = Tensor::zeros(7 * len, DType::F32, &crate::device())?;
        let (input_view, output) = (storage.narrow(0, 0, 3 * len)?, storage.narrow(0, 3 * len, 3 * len)?);
        let fill = || -> comm::Result<()> {
            input_view.slice_set(&input(rank, 3 * len, ReduceOp::Sum, DType::F32), 0, 0)?;
            Ok(())
        };
        fill()?;
        comm.all_to_all(&output, &input_view)?.wait()?;
        let part =
            |from: usize| (rank * len..(rank + 1) * len).map(move |index| value(from, index, ReduceOp::Sum));
        assert_equal(&output, (0..3).flat_map(part), "all_to_all");
        let own = storage.narrow(0, 6 * len, len)?;
        comm.reduce_scatter(&own, &input_view, ReduceOp::Sum)?.wait()?;
        let sums = |rank: usize| (rank * len..(rank + 1) * len).map(|index| reduced(3, index, ReduceOp::Sum));
        assert_equal(&own, sums(rank), "reduce_scatter");
        comm.all_gather(&output, &own)?.wait()?;
        assert_equal(&output, (0..3).flat_map(sums), "all_gather");
        // The output may be this rank's part of the input.
        fill()?;
        let place = input_view.narrow(0, rank * len, len)?;
        comm.reduce_scatter(&place, &input_view, ReduceOp::Sum)?.wait()?;
        assert_equal(&place, sums(rank), "reduce_scatter in place");
        Ok(())
    });
}

/// Long enough for the algorithms that use segments.
pub(crate) fn chain(backend: &dyn Backend) {
    for world_size in [3, 5] {
        backend.run(world_size, &|comm| {
            let (rank, root, len) = (comm.rank(), 1, 600_001);
            for dtype in [DType::F32, DType::BF16, DType::I64] {
                for op in [ReduceOp::Sum, ReduceOp::Max] {
                    let tensor = input(rank, len, op, dtype);
                    comm.reduce(&tensor, op, root)?.wait()?;
                    let expected = |index| {
                        if rank == root { reduced(world_size, index, op) } else { value(rank, index, op) }
                    };
                    assert_equal(&tensor, (0..len).map(expected), &format!("reduce {dtype:?} {op:?}"));
                }
                let tensor = input(rank, len, ReduceOp::Sum, dtype);
                comm.broadcast(&tensor, root)?.wait()?;
                let expected = (0..len).map(|index| value(root, index, ReduceOp::Sum));
                assert_equal(&tensor, expected, &format!("broadcast {dtype:?}"));
            }
            Ok(())
        });
    }
}
