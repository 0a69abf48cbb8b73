//! Local reduction of several ranges of one buffer: f16 and bf16 are reduced in f32 and rounded once.

use std::ops::Range;

use candle_core::DType;

use crate::algorithm::schedule::Combine;
use crate::base::buffer::element::{combine_bytes, divide_bytes};
use crate::base::buffer::storage::{narrow, widen};
use crate::engine::memory::Memory;
use crate::{ReduceOp, Result};

/// Elements at a time: they stay in the processor's L1 cache.
const BLOCK: usize = 2048;

/// Writes to the elements of `range` the reduction of those that begin at each offset in `places`, in that order. An
/// average is divided by the number of places.
pub(super) fn reduce(
    memory: &mut Memory<'_>,
    dtype: DType,
    op: ReduceOp,
    places: &[usize],
    range: Range<usize>,
) -> Result<()> {
    let size = dtype.size_in_bytes();
    let (mut sum, mut next) = (vec![0f32; BLOCK.min(range.len())], vec![0f32; BLOCK.min(range.len())]);
    for start in range.clone().step_by(BLOCK) {
        let len = BLOCK.min(range.end - start);
        for (index, place) in places.iter().enumerate() {
            let values = if index == 0 { &mut sum } else { &mut next };
            let first = (place + start - range.start) * size;
            memory.read_all(first..first + len * size, |done, bytes| {
                let done = done / size;
                widen(dtype, bytes, &mut values[done..done + bytes.len() / size]);
            })?;
            if index > 0 {
                let mine: &mut [u8] = bytemuck::cast_slice_mut(&mut sum[..len]);
                combine_bytes(DType::F32, op, Combine::MineFirst, mine, bytemuck::cast_slice(&next[..len]));
            }
        }
        if op == ReduceOp::Avg {
            divide_bytes(DType::F32, places.len(), bytemuck::cast_slice_mut(&mut sum[..len]));
        }
        memory.write_all(start * size..(start + len) * size, |done, bytes| {
            let done = done / size;
            narrow(dtype, &sum[done..done + bytes.len() / size], bytes);
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor};

    #[test]
    fn halves_are_summed_in_order_and_rounded_once() {
        // 2048 + 1 is not representable in f16: rounded after each step, the sum would stay 2048.
        let values: Vec<f32> = [2048.0, 1.0, 1.0].into_iter().flat_map(|x| vec![x; BLOCK + 3]).collect();
        for (dtype, op, expected) in [
            (DType::F16, ReduceOp::Sum, 2050.0),
            (DType::BF16, ReduceOp::Max, 2048.0),
            (DType::F16, ReduceOp::Avg, 2050.0 / 3.0),
        ] {
            let tensor = Tensor::new(&values[..], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let mut memory = Memory::of(&tensor);
            reduce(&mut memory, dtype, op, &[0, BLOCK + 3, 2 * (BLOCK + 3)], 0..BLOCK + 3).unwrap();
            let rounded = Tensor::new(expected as f32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let expected = rounded.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap();
            let got = tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(got[..BLOCK + 3], vec![expected; BLOCK + 3], "{dtype:?} {op:?}");
            assert_eq!(got[BLOCK + 3..], values[BLOCK + 3..]);
        }
    }
}
