//! Tests of subgroups.

use candle_core::{Device, Tensor};
use comm::{Communicator, Error, ReduceOp};

use crate::Backend;

fn sum(comm: &dyn Communicator, value: usize) -> comm::Result<usize> {
    sum_on(&crate::device(), comm, value)
}

fn sum_on(device: &Device, comm: &dyn Communicator, value: usize) -> comm::Result<usize> {
    let tensor = Tensor::new(&[value as i64], device)?;
    comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
    Ok(tensor.to_vec1::<i64>()?[0] as usize)
}

/// Runs many sums of the members' ranks.
fn many(device: &Device, comm: &dyn Communicator, expected: usize) {
    for round in 0..50 {
        let got = sum_on(device, comm, round * comm.world_ranks()[comm.rank()]).unwrap();
        assert_eq!(got, round * expected);
    }
}

/// Row groups, column groups, and one that crosses both, used at the same time from separate threads.
pub(crate) fn at_the_same_time(backend: &dyn Backend) {
    for world_size in [1, 2, 4, 6] {
        backend.run(world_size, &|comm| {
            let (rank, columns) = (comm.rank(), 2.min(world_size));
            let (row, column) = (rank / columns, rank % columns);
            let rows = comm.split(Some(row), column)?.unwrap();
            // In reverse order, by the key.
            let cols = comm.split(Some(column), world_size - row)?.unwrap();
            assert_eq!((rows.rank(), rows.world_size()), (column, columns));
            let height = world_size / columns;
            assert_eq!((cols.rank(), cols.world_size()), (height - 1 - row, height));
            assert_eq!(rows.world_ranks()[column], rank);
            assert_eq!(cols.world_ranks()[height - 1], column);
            let ends = comm.new_group(&[world_size - 1, 0][..columns])?;
            assert_eq!(ends.is_some(), rank == world_size - 1 || (world_size > 1 && rank == 0));
            let device = &crate::device();
            std::thread::scope(|scope| {
                scope.spawn(|| many(device, &*rows, (0..columns).map(|column| row * columns + column).sum()));
                scope.spawn(|| many(device, &*cols, (0..height).map(|row| row * columns + column).sum()));
                if let Some(ends) = &ends {
                    scope.spawn(|| many(device, &**ends, world_size - 1));
                }
                many(device, comm, world_size * (world_size - 1) / 2);
            });
            // A subgroup of a subgroup.
            let alone = rows.split(Some(rows.rank()), 0)?.unwrap();
            assert_eq!((alone.world_size(), alone.world_ranks()), (1, &[rank][..]));
            let none = comm.split((rank > 0).then_some(0), 0)?;
            assert_eq!(none.is_some(), rank > 0);
            Ok(())
        });
    }
}

/// Colors and keys may be any numbers.
pub(crate) fn large_numbers(backend: &dyn Backend) {
    backend.run(2, &|comm| {
        for large in [i64::MAX as usize, i64::MAX as usize + 1, usize::MAX] {
            for last in 0..2 {
                let key = if comm.rank() == last { large } else { 0 };
                let both = comm.split(Some(large), key)?.unwrap();
                assert_eq!(both.world_ranks(), [1 - last, last]);
            }
            // A rank without a color is in no group.
            let alone = comm.split((comm.rank() == 1).then_some(large), 0)?;
            let members = alone.map(|group| group.world_ranks().to_vec());
            assert_eq!(members, (comm.rank() == 1).then(|| vec![1]));
        }
        Ok(())
    });
}

/// Closing one group does not affect the others.
pub(crate) fn closing(backend: &dyn Backend) {
    backend.run(3, &|comm| {
        let first = comm.new_group(&[0, 1, 2])?.unwrap();
        let second = comm.new_group(&[2, 1, 0])?.unwrap();
        assert_eq!(sum(&*first, 1)?, 3);
        drop(first);
        assert_eq!(sum(&*second, 1)?, 3);
        drop(second);
        assert_eq!(sum(comm, 1)?, 3);
        Ok(())
    });
}

pub(crate) fn mistakes(backend: &dyn Backend) {
    backend.run(2, &|comm| {
        assert!(matches!(comm.new_group(&[]), Err(Error::InvalidArgument { .. })));
        assert!(matches!(comm.new_group(&[0, 1, 0]), Err(Error::InvalidArgument { .. })));
        assert!(matches!(comm.new_group(&[2]), Err(Error::RankOutOfRange { rank: 2, .. })));
        let error = comm.new_group(&[comm.rank()]).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
        assert!(matches!(comm.subgroup(&[1 - comm.rank()]), Err(Error::InvalidArgument { .. })));
        assert_eq!(sum(comm, 1)?, 2);
        Ok(())
    });
}
