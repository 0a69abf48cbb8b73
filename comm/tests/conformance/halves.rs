//! f16 and bf16: the sum of all ranks' values is computed in f32 and rounded once; large tensors are sent in their own
//! dtype.

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, ReduceOp, Result};

use crate::Backend;
use crate::reference::{on_device, values};

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max];
/// For the algorithm of small tensors, and for that of large ones: one segment, a length that is not divisible, several
/// segments.
const LENGTHS: [usize; 6] = [0, 1, 1023, 16_385, 70_001, 700_003];

/// Returns a value that uses all bits of the dtype's precision: some sums are exact in f32 but not in the dtype.
fn value(rank: usize, index: usize, dtype: DType) -> f32 {
    let mixed = (rank as u64 * 0x9e37_79b9 + index as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
    let (range, unit) = if dtype == DType::F16 { (2047, 1024.0) } else { (255, 128.0) };
    (mixed % (2 * range + 1)) as f32 / unit - range as f32 / unit
}

fn input(rank: usize, len: usize, dtype: DType) -> Tensor {
    let values: Vec<f32> = (0..len).map(|index| value(rank, index, dtype)).collect();
    on_device(Tensor::from_vec(values, len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
}

/// Returns the expected result, by the definition.
fn reduced(world_size: usize, range: std::ops::Range<usize>, op: ReduceOp, dtype: DType) -> Vec<f64> {
    let reduce = |index| {
        let operands = (0..world_size).map(|rank| value(rank, index, dtype));
        let result = operands.reduce(|left, right| match op {
            ReduceOp::Min => left.min(right),
            ReduceOp::Max => left.max(right),
            _ => left + right,
        });
        let result = result.unwrap();
        if op == ReduceOp::Avg { result / world_size as f32 } else { result }
    };
    let len = range.len();
    let exact: Vec<f32> = range.map(reduce).collect();
    values(&Tensor::from_vec(exact, len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
}

fn grid(
    backend: &dyn Backend,
    body: impl Fn(&dyn Communicator, DType, ReduceOp, usize) -> Result<()> + Sync,
) {
    for world_size in [1, 2, 3, 4, 7] {
        backend.run(world_size, &|comm| {
            for dtype in [DType::F16, DType::BF16] {
                for (op, len) in OPS.into_iter().flat_map(|op| LENGTHS.map(|len| (op, len))) {
                    if len < 100_000 || op == ReduceOp::Sum {
                        body(comm, dtype, op, len)?;
                    }
                }
            }
            Ok(())
        });
    }
}

pub(crate) fn are_rounded_once(backend: &dyn Backend) {
    grid(backend, |comm, dtype, op, len| {
        let (rank, world_size, what) = (comm.rank(), comm.world_size(), format!("{dtype:?} {op:?} {len}"));
        let expected = reduced(world_size, 0..len, op, dtype);
        let tensor = input(rank, len, dtype);
        comm.all_reduce(&tensor, op)?.wait()?;
        assert!(values(&tensor) == expected, "all_reduce {what}");

        let root = len % world_size;
        let tensor = input(rank, len, dtype);
        comm.reduce(&tensor, op, root)?.wait()?;
        let untouched = || values(&input(rank, len, dtype));
        assert!(
            values(&tensor) == if rank == root { expected.clone() } else { untouched() },
            "reduce {what}"
        );

        let tensor = input(rank, len, dtype);
        let (front, back) = (tensor.narrow(0, 0, len / 3)?, tensor.narrow(0, len / 3, len - len / 3)?);
        comm.all_reduce_coalesced(&[front.copy()?, back.clone()], op)?.wait()?;
        assert!(values(&back) == expected[len / 3..], "coalesced {what}");
        assert!(values(&front) == untouched()[..len / 3], "the copy was summed, not this");

        let counts: Vec<usize> = (0..world_size).map(|rank| len / (rank + 1)).collect();
        let start: usize = counts[..rank].iter().sum();
        let output = Tensor::zeros(counts[rank], dtype, &crate::device())?;
        let whole = input(rank, counts.iter().sum(), dtype);
        comm.reduce_scatter_v(&output, &whole, op, &counts)?.wait()?;
        let part = reduced(world_size, start..start + counts[rank], op, dtype);
        assert!(values(&output) == part, "reduce_scatter {what}");
        Ok(())
    });
}

/// Two bytes an element: see the costs in the documentation of `Communicator`.
pub(crate) fn are_sent_as_they_are(backend: &dyn Backend) {
    for world_size in [2, 3, 5] {
        backend.run(world_size, &|comm| {
            let len = 210_000 * world_size;
            let mut sent = 0;
            let mut since = || {
                let before = std::mem::replace(&mut sent, comm.stats().bytes_sent);
                (sent - before) as usize
            };
            let tensor = input(comm.rank(), len, DType::BF16);
            comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
            let (all_reduce, others) = (since(), world_size - 1);
            // Segments need not be divisible into equal parts.
            assert!(all_reduce.abs_diff(2 * 2 * len * others / world_size) < 1000, "{all_reduce}");
            comm.reduce_scatter(&tensor.narrow(0, 0, len / world_size)?.copy()?, &tensor, ReduceOp::Max)?
                .wait()?;
            assert_eq!(since(), 2 * len * others / world_size);
            comm.reduce(&tensor, ReduceOp::Sum, 0)?.wait()?;
            assert!(since() <= 2 * len);
            Ok(())
        });
    }
}
