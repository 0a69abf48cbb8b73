//! Access to the elements of tensors on any device: in place, or in a copy on the host.

use std::ops::Range;

use candle_core::{DType, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::Result;
use crate::base::buffer::host;
use crate::base::buffer::staging::StagedTensor;

/// Calls `look` with a range of the bytes of a contiguous, non-empty tensor, while its storage is locked for reading.
pub(crate) fn read<R>(tensor: &Tensor, range: Range<usize>, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
    if let Some(stage) = StagedTensor::of(tensor, true) {
        return stage.read(range, look);
    }
    host::read(tensor, range, look)
}

/// Calls `change` with a range of the bytes of a contiguous, non-empty tensor, while its storage is locked for writing.
pub(crate) fn write<R>(
    tensor: &Tensor,
    range: Range<usize>,
    change: impl FnOnce(&mut [u8]) -> R,
) -> Result<R> {
    if let Some(mut stage) = StagedTensor::of(tensor, true) {
        let result = stage.write(range, change)?;
        return stage.finish().map(|()| result);
    }
    host::write(tensor, range, change)
}

/// Converts the bytes of f16 or bf16 elements to f32. `wide` has as many elements as `narrow`.
pub(crate) fn widen(dtype: DType, narrow: &[u8], wide: &mut [f32]) {
    match dtype {
        DType::F16 => bytemuck::cast_slice::<u8, f16>(narrow).convert_to_f32_slice(wide),
        _ => bytemuck::cast_slice::<u8, bf16>(narrow).convert_to_f32_slice(wide),
    }
}

/// Rounds f32 elements to f16 or bf16, as bytes.
pub(crate) fn narrow(dtype: DType, wide: &[f32], narrow: &mut [u8]) {
    match dtype {
        DType::F16 => bytemuck::cast_slice_mut::<u8, f16>(narrow).convert_from_f32_slice(wide),
        _ => bytemuck::cast_slice_mut::<u8, bf16>(narrow).convert_from_f32_slice(wide),
    }
}

/// Returns whether elements of this dtype are reduced in f32.
pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}
