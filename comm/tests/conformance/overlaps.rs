//! Input and output in one storage: which overlaps are allowed, and which are errors.

use candle_core::{DType, Tensor};
use comm::{Error, Message, ReduceOp, Result, Work};

use crate::Backend;
use crate::reference::{assert_equal, input, reduced, value};

const SUM: ReduceOp = ReduceOp::Sum;

/// A rank's part is exactly its range of the whole. The parts are equal, or one of them is empty.
pub(crate) fn in_place(backend: &dyn Backend) {
    for world_size in 1..=4 {
        backend.run(world_size, &|comm| {
            let (rank, root) = (comm.rank(), world_size / 2);
            let even = vec![2000; world_size];
            let uneven: Vec<usize> = (0..world_size).map(|rank| 700 * ((rank + 1) % 3)).collect();
            for (counts, is_even) in [(even, true), (uneven, false)] {
                let end = |rank: usize| counts[..=rank].iter().sum::<usize>();
                let (total, first) = (end(world_size - 1), end(rank) - counts[rank]);
                let owner = |index: usize| (0..world_size).find(|rank| index < end(*rank)).unwrap_or(0);
                for dtype in [DType::F32, DType::BF16, DType::I64] {
                    let what = format!("{dtype:?} {counts:?}");
                    let own = || {
                        let whole = input(rank, total, SUM, dtype);
                        let part = whole.narrow(0, first, counts[rank])?;
                        Ok::<_, Error>((whole, part))
                    };

                    let (whole, part) = own()?;
                    match is_even {
                        true => comm.all_gather(&whole, &part)?.wait()?,
                        false => comm.all_gather_v(&whole, &part, &counts)?.wait()?,
                    }
                    assert_equal(&whole, (0..total).map(|i| value(owner(i), i, SUM)), &what);

                    let (whole, part) = own()?;
                    match is_even {
                        true => comm.reduce_scatter(&part, &whole, SUM)?.wait()?,
                        false => comm.reduce_scatter_v(&part, &whole, SUM, &counts)?.wait()?,
                    }
                    assert_equal(&part, (first..end(rank)).map(|i| reduced(world_size, i, SUM)), &what);

                    let (whole, part) = own()?;
                    let at_root = (rank == root).then_some(&whole);
                    match is_even {
                        true => comm.gather(at_root, &part, root)?.wait()?,
                        false => comm.gather_v(at_root, &part, root, &counts)?.wait()?,
                    }
                    let from = |i: usize| if rank == root { owner(i) } else { rank };
                    assert_equal(&whole, (0..total).map(|i| value(from(i), i, SUM)), &what);

                    let (whole, part) = own()?;
                    let at_root = (rank == root).then_some(&whole);
                    match is_even {
                        true => comm.scatter(&part, at_root, root)?.wait()?,
                        false => comm.scatter_v(&part, at_root, root, &counts)?.wait()?,
                    }
                    assert_equal(&part, (first..end(rank)).map(|i| value(root, i, SUM)), &what);
                }
            }
            Ok(())
        });
    }
}

/// Every rank makes the same mistake, and the group stays usable.
pub(crate) fn refused(backend: &dyn Backend) {
    for world_size in 1..=4 {
        backend.run(world_size, &|comm| {
            let rank = comm.rank();
            let tensor = input(rank, 3 * world_size, SUM, DType::F32);
            let whole = tensor.narrow(0, 0, 2 * world_size)?;
            // Two elements, beginning one after this rank's part.
            let beside = tensor.narrow(0, 2 * rank + 1, 2)?;
            let counts = vec![2; world_size];
            let at_root = (rank == 0).then_some(&whole);
            let is_refused = |call: Result<Work>| {
                let message = call.map(|_| ()).unwrap_err().to_string();
                assert!(message.contains("overlap"), "{message}");
            };
            is_refused(comm.all_to_all(&whole, &whole));
            is_refused(comm.all_to_all(&tensor.narrow(0, world_size, 2 * world_size)?, &whole));
            is_refused(comm.all_to_all_v(&whole, &whole, &counts, &counts));
            is_refused(comm.all_gather(&whole, &beside));
            is_refused(comm.all_gather_v(&whole, &beside, &counts));
            is_refused(comm.reduce_scatter(&beside, &whole, SUM));
            is_refused(comm.reduce_scatter_v(&beside, &whole, SUM, &counts));
            if rank == 0 {
                is_refused(comm.gather(at_root, &beside, 0));
                is_refused(comm.gather_v(at_root, &beside, 0, &counts));
                is_refused(comm.scatter(&beside, at_root, 0));
                is_refused(comm.scatter_v(&beside, at_root, 0, &counts));
            }
            is_refused(comm.all_reduce_coalesced(&[whole.clone(), beside.copy()?, beside.clone()], SUM));
            if world_size > 1 {
                let peer = (rank + 1) % world_size;
                let send = |tensor: &Tensor| Message::Send { tensor: tensor.clone(), to: peer };
                let recv = |tensor: &Tensor| Message::Recv { tensor: tensor.clone(), from: peer };
                is_refused(comm.batch(vec![send(&whole), recv(&beside)]));
                is_refused(comm.batch(vec![recv(&whole), send(&beside.copy()?), send(&beside)]));
                is_refused(comm.batch(vec![recv(&whole), send(&beside.copy()?), recv(&beside)]));
            }
            comm.all_reduce(&tensor, SUM)?.wait()?;
            let sums = (0..3 * world_size).map(|index| reduced(world_size, index, SUM));
            assert_equal(&tensor, sums, "nothing was changed by what was refused");
            Ok(())
        });
    }
}

/// A tensor that is only sent, or only broadcast, may be given twice.
pub(crate) fn twice(backend: &dyn Backend) {
    backend.run(2, &|comm| {
        let (rank, peer) = (comm.rank(), 1 - comm.rank());
        let tensor = input(rank, 1000, SUM, DType::F32);
        let back = tensor.narrow(0, 500, 500)?;
        let (first, second) = (tensor.zeros_like()?, Tensor::zeros(500, DType::F32, &crate::device())?);
        let send = |tensor: &Tensor| Message::Send { tensor: tensor.clone(), to: peer };
        let recv = |tensor: &Tensor| Message::Recv { tensor: tensor.clone(), from: peer };
        comm.batch(vec![send(&tensor), send(&back), recv(&first), recv(&second)])?.wait()?;
        assert_equal(&first, (0..1000).map(|index| value(peer, index, SUM)), "the first");
        assert_equal(&second, (500..1000).map(|index| value(peer, index, SUM)), "the second");
        comm.broadcast_coalesced(&[tensor.clone(), back, tensor.clone()], 1)?.wait()?;
        assert_equal(&tensor, (0..1000).map(|index| value(1, index, SUM)), "broadcast");
        Ok(())
    });
}
