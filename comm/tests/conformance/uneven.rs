//! Parts of different lengths, the shortest of them empty.

use candle_core::{DType, Tensor};
use comm::{Communicator, Error, Operation, ReduceOp};

use crate::Backend;
use crate::cases::{WORLD_SIZES, grid};
use crate::reference::{DTYPES, assert_equal, input, reduced, value};

pub(crate) fn collectives(backend: &dyn Backend) {
    grid(backend, |comm, dtype, op, len| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let counts: Vec<usize> = (0..world_size).map(|rank| (len + 2 * rank) * (rank % 3) / 2).collect();
        let total = counts.iter().sum();
        let first: usize = counts[..rank].iter().sum();
        let place = first..first + counts[rank];
        let (root, what) = (len % world_size, format!("{dtype:?} {op:?} {counts:?}"));
        let (own, whole) = (input(rank, counts[rank], op, dtype), input(rank, total, op, dtype));
        let zeros = |len: usize| Tensor::zeros(len, dtype, &crate::device());
        let every = || (0..world_size).flat_map(|rank| (0..counts[rank]).map(move |i| value(rank, i, op)));

        let all = zeros(total)?;
        comm.all_gather_v(&all, &own, &counts)?.wait()?;
        assert_equal(&all, every(), &what);

        let gathered = zeros(total)?;
        comm.gather_v((rank == root).then_some(&gathered), &own, root, &counts)?.wait()?;
        if rank == root {
            assert_equal(&gathered, every(), &what);
        }

        let part = zeros(counts[rank])?;
        comm.scatter_v(&part, (rank == root).then_some(&whole), root, &counts)?.wait()?;
        assert_equal(&part, place.clone().map(|index| value(root, index, op)), &what);

        comm.reduce_scatter_v(&part, &whole, op, &counts)?.wait()?;
        assert_equal(&part, place.map(|index| reduced(world_size, index, op)), &what);
        Ok(())
    });
}

/// Each rank knows only its own counts.
pub(crate) fn all_to_all(backend: &dyn Backend) {
    let count = |from: usize, to: usize| (5 * from + 3 * to) % 4 * if from == 1 { 9000 } else { 1 };
    for world_size in WORLD_SIZES {
        backend.run(world_size, &|comm| {
            let rank = comm.rank();
            for dtype in DTYPES {
                let goes: Vec<usize> = (0..world_size).map(|to| count(rank, to)).collect();
                let comes: Vec<usize> = (0..world_size).map(|from| count(from, rank)).collect();
                let own = input(rank, goes.iter().sum(), ReduceOp::Sum, dtype);
                let output = Tensor::zeros(comes.iter().sum::<usize>(), dtype, &crate::device())?;
                comm.all_to_all_v(&output, &own, &comes, &goes)?.wait()?;
                let part = |from: usize| {
                    let first: usize = (0..rank).map(|to| count(from, to)).sum();
                    (first..first + count(from, rank)).map(move |i| value(from, i, ReduceOp::Sum))
                };
                assert_equal(&output, (0..world_size).flat_map(part), &format!("{dtype:?}"));
            }
            Ok(())
        });
    }
}

type Call = fn(&dyn Communicator, &Tensor) -> comm::Result<comm::Work>;

pub(crate) fn mismatches(backend: &dyn Backend) {
    let calls: [Call; 4] = [
        |comm, tensor| {
            let counts = if comm.rank() == 1 { [4, 1, 1] } else { [3, 2, 1] };
            comm.all_gather_v(tensor, &tensor.narrow(0, 0, counts[comm.rank()])?.copy()?, &counts)
        },
        |comm, tensor| {
            let counts = [2, if comm.rank() == 2 { 1 } else { 2 }, if comm.rank() == 2 { 3 } else { 2 }];
            let output = tensor.narrow(0, 0, counts[comm.rank()])?.copy()?;
            comm.reduce_scatter_v(&output, tensor, ReduceOp::Sum, &counts)
        },
        |comm, tensor| {
            // Rank 2 expects one element from rank 0, which sends two.
            let comes = if comm.rank() == 2 { [1, 3, 2] } else { [2, 2, 2] };
            comm.all_to_all_v(tensor, &tensor.copy()?, &comes, &[2, 2, 2])
        },
        |comm, tensor| {
            // The same, with an input in equal parts.
            let comes = if comm.rank() == 2 { vec![1, 3, 2] } else { vec![2, 2, 2] };
            let (output, input) = (tensor.clone(), tensor.copy()?);
            let (output_counts, input_counts) = (Some(comes), None);
            comm.submit(Operation::AllToAll { output, input, output_counts, input_counts })
        },
    ];
    for call in calls {
        backend.run(3, &|comm| {
            let tensor = Tensor::zeros(6, DType::F32, &crate::device())?;
            // A late rank gets the error when it submits the call.
            let error = call(comm, &tensor).and_then(comm::Work::wait).unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "rank {}: {error}", comm.rank());
            Ok(())
        });
    }
}
