//! Memory that goes in and out of tensors.
//!
//! A parameter's tensor is in many places at once: in the model, in the graph that backward will go through, maybe with the
//! user. All share one storage, so exchanging what is in it releases and refills all of them. A released storage holds no
//! elements, and says that it is of a dtype (4-bit floats) which no operation of candle computes with: whoever uses such a
//! tensor gets an error, as candle looks at the storage's dtype before it looks at elements. An empty storage of the tensor's
//! own dtype would not do: candle reads it without looking at its length.

use std::cell::RefCell;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Tensor, bail};
use half::{bf16, f16};

/// Puts elements into a tensor, and gives those that it had.
pub(crate) fn exchange(tensor: &Tensor, storage: CpuStorage) -> Result<CpuStorage> {
    let exchange = Exchange(RefCell::new(storage));
    tensor.inplace_op1(&exchange)?;
    Ok(exchange.0.into_inner())
}

/// Takes a tensor's elements out of it. It cannot be computed with until others are put into it.
pub(crate) fn take(tensor: &Tensor) -> Result<CpuStorage> {
    exchange(tensor, released())
}

/// What is in the tensors of parameters that are not there.
pub(crate) fn released() -> CpuStorage {
    CpuStorage::F4(Vec::new())
}

struct Exchange(RefCell<CpuStorage>);

impl InplaceOp1 for Exchange {
    fn name(&self) -> &'static str {
        "fsdp-exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        std::mem::swap(storage, &mut *self.0.borrow_mut());
        Ok(())
    }
}

/// Runs the same for each dtype that can be trained; `else` for the others.
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

/// A copy of some elements.
pub(crate) fn copy(storage: &CpuStorage, start: usize, len: usize) -> Result<CpuStorage> {
    Ok(each_float!(storage, data => data[start..start + len].to_vec(), else bail!("fsdp: no float")))
}

/// So many zeros, which take no memory before they are written to, where the system can do that.
pub(crate) fn zeros(dtype: DType, len: usize) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F64 => CpuStorage::F64(vec![0.0; len]),
        DType::F32 => CpuStorage::F32(vec![0.0; len]),
        DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
        DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
        dtype => bail!("fsdp: {dtype:?} is no dtype of parameters"),
    })
}

/// A tensor of one dimension with these elements.
pub(crate) fn tensor(storage: CpuStorage) -> Result<Tensor> {
    match storage {
        CpuStorage::F64(data) => vector(data),
        CpuStorage::F32(data) => vector(data),
        CpuStorage::F16(data) => vector(data),
        CpuStorage::BF16(data) => vector(data),
        _ => bail!("fsdp: no float"),
    }
}

fn vector<T: candle_core::WithDType>(data: Vec<T>) -> Result<Tensor> {
    let len = data.len();
    Tensor::from_vec(data, len, &Device::Cpu)
}

/// True for what can be trained.
pub(crate) fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

fn len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::F64(data) => data.len(),
        CpuStorage::F32(data) => data.len(),
        CpuStorage::F16(data) => data.len(),
        CpuStorage::BF16(data) => data.len(),
        _ => 0,
    }
}

/// Buffers that parameters are gathered in: memory that has been used before need not be asked of the system again.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: Vec<CpuStorage>,
    /// Bytes in use and free.
    bytes: usize,
    /// Above this, free buffers are given back to the system first.
    budget: usize,
}

impl Pool {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, ..Self::default() }
    }

    /// A buffer of so many elements, of any values; and by how many bytes the pool has grown.
    pub(crate) fn take(&mut self, dtype: DType, count: usize) -> Result<CpuStorage> {
        let fits = |storage: &CpuStorage| storage_dtype(storage) == Some(dtype) && len(storage) == count;
        if let Some(place) = self.free.iter().position(fits) {
            return Ok(self.free.swap_remove(place));
        }
        let wanted = count * dtype.size_in_bytes();
        while self.bytes + wanted > self.budget {
            let Some(unneeded) = self.free.pop() else { break };
            self.bytes -= bytes(&unneeded);
        }
        self.bytes += wanted;
        zeros(dtype, count)
    }

    /// Takes a buffer back.
    pub(crate) fn give(&mut self, storage: CpuStorage) {
        if self.bytes > self.budget {
            self.bytes -= bytes(&storage);
        } else if bytes(&storage) > 0 {
            self.free.push(storage);
        }
    }

    /// Bytes that it holds, in use or not.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

fn storage_dtype(storage: &CpuStorage) -> Option<DType> {
    match storage {
        CpuStorage::F64(_) => Some(DType::F64),
        CpuStorage::F32(_) => Some(DType::F32),
        CpuStorage::F16(_) => Some(DType::F16),
        CpuStorage::BF16(_) => Some(DType::BF16),
        _ => None,
    }
}

pub(crate) fn bytes(storage: &CpuStorage) -> usize {
    len(storage) * storage_dtype(storage).map_or(0, |dtype| dtype.size_in_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_of_a_released_tensor_are_released_and_come_back() -> Result<()> {
        let whole = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
        let (view, column) = (whole.t()?, whole.narrow(1, 1, 1)?);
        let storage = take(&whole)?;
        for tensor in [&whole, &view, &column, &whole.detach()] {
            assert!(tensor.sqr().is_err() && tensor.contiguous().and_then(|t| t.sum_all()).is_err());
            assert!(tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).is_err());
        }
        assert!(whole.matmul(&whole).is_err());
        exchange(&whole, storage)?;
        assert_eq!(view.to_vec2::<f32>()?, [[1.0, 3.0], [2.0, 4.0]]);
        Ok(())
    }

    #[test]
    fn a_pool_gives_what_it_was_given_and_keeps_to_its_budget() -> Result<()> {
        let mut pool = Pool::new(100);
        let (a, b) = (pool.take(DType::F32, 20)?, pool.take(DType::F64, 2)?);
        assert_eq!(pool.bytes(), 96);
        pool.give(a);
        assert_eq!((pool.take(DType::F32, 20)?.as_slice::<f32>()?.len(), pool.bytes()), (20, 96));
        pool.give(b);
        pool.take(DType::F32, 4)?;
        assert_eq!(pool.bytes(), 96, "the free one was given back to the system");
        let over = pool.take(DType::F32, 10)?;
        assert_eq!(pool.bytes(), 136);
        pool.give(over);
        assert_eq!(pool.bytes(), 96);
        Ok(())
    }
}
