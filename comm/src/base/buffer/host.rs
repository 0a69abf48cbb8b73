//! Access to the elements of CPU tensors, in place.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};

use crate::{Error, Result};

/// Calls `look` with a range of the bytes of a contiguous, non-empty tensor, while its storage is locked for reading.
pub(crate) fn read<R>(tensor: &Tensor, range: Range<usize>, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let elements = layout.contiguous_offsets().map(|(start, end)| start..end).ok_or_else(not_usable)?;
    let Storage::Cpu(storage) = &*storage else { return Err(not_usable()) };
    macro_rules! see {
        ($data:expr) => {
            Ok(look(&bytemuck::cast_slice(&$data[elements])[range]))
        };
    }
    match storage {
        CpuStorage::F64(data) => see!(data),
        CpuStorage::F32(data) => see!(data),
        CpuStorage::F16(data) => see!(data),
        CpuStorage::BF16(data) => see!(data),
        CpuStorage::U8(data) => see!(data),
        CpuStorage::U32(data) => see!(data),
        CpuStorage::I64(data) => see!(data),
        _ => Err(not_usable()),
    }
}

/// Calls `change` with a range of the bytes of a contiguous, non-empty tensor, while its storage is locked for writing.
pub(crate) fn write<R>(
    tensor: &Tensor,
    range: Range<usize>,
    change: impl FnOnce(&mut [u8]) -> R,
) -> Result<R> {
    let op = InPlace { range, change: RefCell::new(Some(change)), result: RefCell::new(None) };
    let source = match tensor.inplace_op1(&op) {
        Ok(()) => return op.result.into_inner().ok_or_else(not_usable),
        Err(source) => source,
    };
    Err(Error::Tensor { operation: "writing into a tensor".into(), source: Arc::new(source) })
}

fn not_usable() -> Error {
    Error::invalid("a tensor", "one that is not contiguous on the CPU", "call `contiguous()` first")
}

struct InPlace<F, R> {
    range: Range<usize>,
    change: RefCell<Option<F>>,
    result: RefCell<Option<R>>,
}

impl<R, F: FnOnce(&mut [u8]) -> R> InplaceOp1 for InPlace<F, R> {
    fn name(&self) -> &'static str {
        "comm"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (Some(change), Some((start, end))) = (self.change.take(), layout.contiguous_offsets()) else {
            return Ok(());
        };
        macro_rules! change {
            ($data:expr) => {
                Some(change(&mut bytemuck::cast_slice_mut(&mut $data[start..end])[self.range.clone()]))
            };
        }
        *self.result.borrow_mut() = match storage {
            CpuStorage::F64(data) => change!(data),
            CpuStorage::F32(data) => change!(data),
            CpuStorage::F16(data) => change!(data),
            CpuStorage::BF16(data) => change!(data),
            CpuStorage::U8(data) => change!(data),
            CpuStorage::U32(data) => change!(data),
            CpuStorage::I64(data) => change!(data),
            _ => None,
        };
        Ok(())
    }
}
