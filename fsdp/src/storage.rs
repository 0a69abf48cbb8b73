//! Storage exchange: fills and releases the memory of tensors in place.
//!
//! A parameter's tensor is referenced from the model, from the autograd graph, and possibly by the user. All share one
//! storage, so exchanging its contents releases and refills all of them. A released storage has no elements and a dtype
//! (4-bit floats) that no candle operation supports: using such a tensor is an error, because candle checks the storage's
//! dtype before it reads elements. An empty storage of the tensor's own dtype would not do: candle reads it without checking
//! its length.

use std::cell::RefCell;

use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, MetalStorage, Result, Storage, Tensor, bail,
};
use half::vec::HalfBitsVecExt;

use crate::values::copy_range;

/// Replaces the storage of a tensor, and returns the old one.
pub(crate) fn replace_storage(tensor: &Tensor, storage: Storage) -> Result<Storage> {
    let exchange = Exchange(RefCell::new(storage));
    tensor.inplace_op1(&exchange)?;
    Ok(exchange.0.into_inner())
}

/// Takes the storage out of a tensor. The tensor cannot be used until another one is put in.
pub(crate) fn take_storage(tensor: &Tensor) -> Result<Storage> {
    replace_storage(tensor, released(tensor.device())?)
}

/// Returns the storage of a released parameter.
fn released(device: &Device) -> Result<Storage> {
    match device {
        Device::Cpu => Ok(Storage::Cpu(CpuStorage::F4(Vec::new()))),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            // One element, so that no CUDA library is asked for an empty allocation.
            let slice = candle_core::cuda::CudaStorageSlice::F4(device.alloc_zeros::<u8>(1)?);
            Ok(Storage::Cuda(CudaStorage { slice, device: device.clone() }))
        }
        #[cfg(feature = "metal")]
        Device::Metal(device) => {
            let buffer = device.new_buffer(1, DType::U8, "released")?;
            Ok(Storage::Metal(MetalStorage::new(buffer, device.clone(), 1, DType::F4)))
        }
        _ => bail!("fsdp: parameters cannot be on {:?}", device.location()),
    }
}

/// Returns true for a tensor without a storage of its own dtype: a released parameter, or a view of one.
pub(crate) fn is_released(tensor: &Tensor) -> bool {
    tensor.storage_and_layout().0.dtype() != tensor.dtype()
}

/// Returns true for devices that parameters can be on.
pub(crate) fn is_supported(device: &Device) -> bool {
    device.is_cpu()
        || (cfg!(feature = "cuda") && device.is_cuda())
        || (cfg!(feature = "metal") && device.is_metal())
}

struct Exchange(RefCell<Storage>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "fsdp-exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        match &mut *self.0.borrow_mut() {
            Storage::Cpu(other) => std::mem::swap(storage, other),
            _ => bail!("fsdp: elements of another device"),
        }
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        match &mut *self.0.borrow_mut() {
            Storage::Cuda(other) => std::mem::swap(storage, other),
            _ => bail!("fsdp: elements of another device"),
        }
        Ok(())
    }

    fn metal_fwd(&self, storage: &mut MetalStorage, _: &Layout) -> Result<()> {
        match &mut *self.0.borrow_mut() {
            Storage::Metal(other) => std::mem::swap(storage, other),
            _ => bail!("fsdp: elements of another device"),
        }
        Ok(())
    }
}

/// Runs the same expression for each trainable dtype, and `else` for the others.
macro_rules! each_float {
    ($storage:expr, $data:ident => $body:expr, else $other:expr) => {
        match $storage {
            CpuStorage::F64($data) => CpuStorage::F64($body),
            CpuStorage::F32($data) => CpuStorage::F32($body),
            CpuStorage::F16($data) => CpuStorage::F16($body),
            CpuStorage::BF16($data) => CpuStorage::BF16($body),
            _ => $other,
        }
    };
}

/// Copies a range of elements.
pub(crate) fn copy(storage: &CpuStorage, start: usize, len: usize) -> Result<CpuStorage> {
    Ok(each_float!(storage, data => data[start..start + len].to_vec(), else bail!("fsdp: no float")))
}

/// Copies a range of elements of a contiguous one-dimensional tensor.
pub(crate) fn piece(tensor: &Tensor, start: usize, len: usize) -> Result<Storage> {
    {
        let (storage, layout) = tensor.storage_and_layout();
        if let Storage::Cpu(storage) = &*storage {
            return Ok(Storage::Cpu(copy(storage, layout.start_offset() + start, len)?));
        }
    }
    take_storage(&copy_range(tensor, start..start + len)?)
}

/// Returns `len` zeros; where the operating system supports it, they take no memory until they are written.
pub(crate) fn zeros(dtype: DType, len: usize) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F64 => CpuStorage::F64(vec![0.0; len]),
        DType::F32 => CpuStorage::F32(vec![0.0; len]),
        DType::F16 => CpuStorage::F16(vec![0u16; len].reinterpret_into()),
        DType::BF16 => CpuStorage::BF16(vec![0u16; len].reinterpret_into()),
        dtype => bail!("fsdp: {dtype:?} is no dtype of parameters"),
    })
}

/// Returns a one-dimensional tensor of `len` zeros.
pub(crate) fn zero_tensor(dtype: DType, len: usize, device: &Device) -> Result<Tensor> {
    match device {
        Device::Cpu => Ok(tensor(Storage::Cpu(zeros(dtype, len)?), len)),
        device => Tensor::zeros(len, dtype, device),
    }
}

/// Returns a one-dimensional tensor of these `len` elements.
pub(crate) fn tensor(storage: Storage, len: usize) -> Tensor {
    Tensor::from_storage(storage, len, BackpropOp::none(), false)
}

/// Returns true for dtypes that can be trained.
pub(crate) fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// Pool of the buffers that parameters are gathered in, which reuses freed memory.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Each with its number of elements.
    free: Vec<(Storage, usize)>,
    /// Bytes in use and free.
    bytes: usize,
    /// Limit in bytes above which free buffers are freed to the system.
    budget: usize,
}

impl Pool {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, ..Self::default() }
    }

    /// Returns a tensor of `count` elements with unspecified values.
    pub(crate) fn take(&mut self, dtype: DType, count: usize, device: &Device) -> Result<Tensor> {
        let fits = |(storage, len): &(Storage, usize)| storage.dtype() == dtype && *len == count;
        if let Some(place) = self.free.iter().position(fits) {
            return Ok(tensor(self.free.swap_remove(place).0, count));
        }
        let wanted = count * dtype.size_in_bytes();
        while self.bytes + wanted > self.budget {
            let Some((unneeded, len)) = self.free.pop() else { break };
            self.bytes -= len * unneeded.dtype().size_in_bytes();
        }
        self.bytes += wanted;
        zero_tensor(dtype, count, device)
    }

    /// Returns a buffer of `count` elements to the pool.
    pub(crate) fn give_back(&mut self, storage: Storage, count: usize) {
        if !is_trainable(storage.dtype()) || count == 0 {
            // The tensor had been released already, or is empty.
        } else if self.bytes > self.budget {
            self.bytes -= count * storage.dtype().size_in_bytes();
        } else {
            self.free.push((storage, count));
        }
    }

    /// Returns the bytes that it holds, in use or free.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_of_a_released_tensor_are_released_and_come_back() -> Result<()> {
        let whole = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
        let (view, column) = (whole.t()?, whole.narrow(1, 1, 1)?);
        let storage = take_storage(&whole)?;
        for tensor in [&whole, &view, &column, &whole.detach()] {
            assert!(tensor.sqr().is_err() && tensor.contiguous().and_then(|t| t.sum_all()).is_err());
            assert!(tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).is_err());
        }
        assert!(whole.matmul(&whole).is_err());
        replace_storage(&whole, storage)?;
        assert_eq!(view.to_vec2::<f32>()?, [[1.0, 3.0], [2.0, 4.0]]);
        Ok(())
    }

    #[test]
    fn a_pool_gives_what_it_was_given_and_keeps_to_its_budget() -> Result<()> {
        let mut pool = Pool::new(100);
        let take_one = |pool: &mut Pool, dtype, count| pool.take(dtype, count, &Device::Cpu);
        let (a, b) = (take_one(&mut pool, DType::F32, 20)?, take_one(&mut pool, DType::F64, 2)?);
        assert_eq!(pool.bytes(), 96);
        pool.give_back(take_storage(&a)?, 20);
        let again = take_one(&mut pool, DType::F32, 20)?;
        assert_eq!((again.to_vec1::<f32>()?.len(), pool.bytes()), (20, 96));
        pool.give_back(take_storage(&b)?, 2);
        take_one(&mut pool, DType::F32, 4)?;
        assert_eq!(pool.bytes(), 96, "the free one was given back to the system");
        let over = take_one(&mut pool, DType::F32, 10)?;
        assert_eq!(pool.bytes(), 136);
        pool.give_back(take_storage(&over)?, 10);
        assert_eq!(pool.bytes(), 96);
        Ok(())
    }
}
