//! The elements of contiguous tensors on a CPU.

use candle_core::{CpuStorage, Layout, Storage, Tensor, WithDType, bail};

/// The elements of a contiguous tensor, from the storage and layout passed to a custom operation.
///
/// # Errors
/// candle's, if it is not contiguous or of another dtype.
pub fn dense<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [T]> {
    dense_part(T::cpu_storage_as_slice(storage)?, layout)
}

/// The elements of a contiguous tensor, from all those of its storage.
pub(crate) fn dense_part<'a, T>(data: &'a [T], layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets().and_then(|(start, end)| data.get(start..end)) {
        Some(part) => Ok(part),
        None => bail!("a fused operation was given a tensor that is not contiguous"),
    }
}

/// Calls `f` with the elements of a contiguous CPU tensor.
pub(crate) fn with_numbers<T: WithDType, R>(
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> candle_core::Result<R>,
) -> candle_core::Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(dense(storage, layout)?),
        _ => bail!("a fused operation on the CPU was given a tensor of another device"),
    }
}
