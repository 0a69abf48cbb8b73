//! The elements of candle tensors, in place.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use half::slice::HalfFloatSliceExt;

use crate::element::Element;
use crate::{Error, Result};

/// Something to do with the elements of a tensor, whatever their type.
pub(crate) trait Visitor {
    /// Whether f16 and bf16 come as f32 (and are rounded once, at the end): for everything that adds.
    const WIDEN: bool;

    fn visit<T: Element>(self, data: &mut [T]) -> Result<()>;
}

/// Lets `visitor` work on the elements of a contiguous CPU tensor, under the lock of its storage.
pub(crate) fn visit<V: Visitor>(tensor: &Tensor, operation: &'static str, visitor: V) -> Result<()> {
    if tensor.elem_count() == 0 {
        // Candle takes some empty layouts for overlapping ones.
        return visitor.visit::<u8>(&mut []);
    }
    let op = InPlace { visitor: RefCell::new(Some(visitor)), result: RefCell::new(Ok(())) };
    tensor.inplace_op1(&op).map_err(|source| tensor_error(operation, source))?;
    op.result.into_inner()
}

/// The bytes of a contiguous CPU tensor.
pub(crate) fn bytes(tensor: &Tensor, operation: &'static str) -> Result<Vec<u8>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some(range) = layout.contiguous_offsets().map(|(start, end)| start..end) else {
        return Err(not_usable(operation));
    };
    let Storage::Cpu(storage) = &*storage else { return Err(not_usable(operation)) };
    macro_rules! copy {
        ($data:expr) => {
            bytemuck::cast_slice(&$data[range]).to_vec()
        };
    }
    Ok(match storage {
        CpuStorage::F64(data) => copy!(data),
        CpuStorage::F32(data) => copy!(data),
        CpuStorage::F16(data) => copy!(data),
        CpuStorage::BF16(data) => copy!(data),
        CpuStorage::U8(data) => copy!(data),
        CpuStorage::U32(data) => copy!(data),
        CpuStorage::I64(data) => copy!(data),
        _ => return Err(not_usable(operation)),
    })
}

pub(crate) fn tensor_error(operation: &'static str, source: candle_core::Error) -> Error {
    Error::Tensor { operation: operation.into(), source: Arc::new(source) }
}

fn not_usable(operation: &'static str) -> Error {
    Error::invalid(operation, "a tensor that is not contiguous on the CPU", "call `contiguous()` first")
}

struct InPlace<V> {
    visitor: RefCell<Option<V>>,
    result: RefCell<Result<()>>,
}

impl<V: Visitor> InPlace<V> {
    fn widened<N>(visitor: V, data: &mut [N]) -> Result<()>
    where
        N: Element,
        [N]: HalfFloatSliceExt,
    {
        if !V::WIDEN {
            return visitor.visit(data);
        }
        let mut wide = vec![0f32; data.len()];
        data.convert_to_f32_slice(&mut wide);
        visitor.visit(&mut wide)?;
        data.convert_from_f32_slice(&wide);
        Ok(())
    }
}

impl<V: Visitor> InplaceOp1 for InPlace<V> {
    fn name(&self) -> &'static str {
        "comm"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (Some(visitor), Some((start, end))) = (self.visitor.take(), layout.contiguous_offsets()) else {
            *self.result.borrow_mut() = Err(not_usable(self.name()));
            return Ok(());
        };
        let result = match storage {
            CpuStorage::F64(data) => visitor.visit(&mut data[start..end]),
            CpuStorage::F32(data) => visitor.visit(&mut data[start..end]),
            CpuStorage::F16(data) => Self::widened(visitor, &mut data[start..end]),
            CpuStorage::BF16(data) => Self::widened(visitor, &mut data[start..end]),
            CpuStorage::U8(data) => visitor.visit(&mut data[start..end]),
            CpuStorage::U32(data) => visitor.visit(&mut data[start..end]),
            CpuStorage::I64(data) => visitor.visit(&mut data[start..end]),
            _ => Err(not_usable(self.name())),
        };
        *self.result.borrow_mut() = result;
        Ok(())
    }
}
