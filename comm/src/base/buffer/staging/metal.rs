//! Staging of Metal tensors in a CPU tensor: links and reductions work on host memory only.
//!
//! All work of such a device goes through one queue, in the order in which it is enqueued, by whatever thread. So a
//! copy to the host runs after whatever computes the tensor, and nothing else must be waited for. The price is that it
//! also runs after what was enqueued since the operation was submitted.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::base::buffer::host;
use crate::{Error, Operation, Result};

/// Returns whether tensors on this device can take part in operations.
pub(crate) fn is_supported(device: &Device) -> bool {
    device.is_cpu() || device.is_metal()
}

/// Copies a CPU tensor to a device.
pub(crate) fn upload(tensor: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    tensor.to_device(device)
}

/// The device work that must be done before an operation may begin: none, since the device's queue keeps the order.
pub(crate) struct Before;

impl Before {
    pub(crate) fn of(_: &Operation) -> Result<Self> {
        Ok(Self)
    }

    pub(crate) fn wait(&self) -> Result<()> {
        Ok(())
    }
}

/// Staging copy of a device tensor's elements on the host.
pub(crate) struct StagedTensor<'a> {
    tensor: &'a Tensor,
    host: OnceCell<Tensor>,
    /// Whether the tensor's old elements are needed, because they are read or not all overwritten.
    keeps: bool,
    changed: bool,
}

impl<'a> StagedTensor<'a> {
    /// Returns `None` for a CPU tensor. `keeps` may be false if the tensor is overwritten from its first to its last
    /// element.
    pub(crate) fn of(tensor: &'a Tensor, keeps: bool) -> Option<Self> {
        tensor.device().is_metal().then(|| Self::over(tensor, keeps))
    }

    fn over(tensor: &'a Tensor, keeps: bool) -> Self {
        Self { tensor, host: OnceCell::new(), keeps, changed: false }
    }

    pub(crate) fn read<R>(&self, range: Range<usize>, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        host::read(self.host()?, range, look)
    }

    pub(crate) fn write<R>(&mut self, range: Range<usize>, change: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        self.changed = true;
        host::write(self.host()?, range, change)
    }

    fn host(&self) -> Result<&Tensor> {
        if self.host.get().is_none() {
            let host = if self.keeps { download(self.tensor) } else { blank(self.tensor) };
            // `self` is not `Sync`, so nobody else can have set it.
            let _ = self.host.set(host.map_err(failed)?);
        }
        self.host
            .get()
            .ok_or_else(|| Error::invalid("a tensor", "one without a copy on the host", "report this"))
    }

    /// Copies the elements back to the tensor, if they were changed.
    pub(crate) fn finish(self) -> Result<()> {
        let Some(host) = self.host.get().filter(|_| self.changed) else { return Ok(()) };
        // A view: writing to it writes to the tensor.
        let whole = self.tensor.detach().flatten_all().map_err(failed)?;
        host.to_device(self.tensor.device()).and_then(|copy| whole.slice_set(&copy, 0, 0)).map_err(failed)
    }
}

/// Copies only the elements of the tensor, even if it is a view of a larger storage.
fn download(tensor: &Tensor) -> candle_core::Result<Tensor> {
    tensor.detach().flatten_all()?.force_contiguous()?.to_device(&Device::Cpu)
}

fn blank(tensor: &Tensor) -> candle_core::Result<Tensor> {
    Tensor::zeros(tensor.elem_count(), tensor.dtype(), &Device::Cpu)
}

fn failed(source: candle_core::Error) -> Error {
    Error::Tensor {
        operation: "copying between a Metal device and the host".into(),
        source: Arc::new(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CPU tensors stand in for device tensors: the copies are made in the same way.
    #[test]
    fn a_part_of_a_tensor_goes_to_the_host_and_comes_back() {
        let whole = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((4, 3)).unwrap();
        let part = whole.narrow(0, 1, 2).unwrap();
        let mut stage = StagedTensor::over(&part, true);
        let read = stage.read(4..12, |bytes| bytemuck::cast_slice::<u8, f32>(bytes).to_vec()).unwrap();
        assert_eq!(read, [4.0, 5.0]);
        stage.write(0..8, |bytes| bytemuck::cast_slice_mut::<u8, f32>(bytes).fill(-1.0)).unwrap();
        let before = whole.narrow(0, 1, 1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(before, [3.0, 4.0, 5.0], "nothing is written before the end");
        stage.finish().unwrap();
        let after = whole.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(after, [0.0, 1.0, 2.0, -1.0, -1.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
    }

    #[test]
    fn what_is_overwritten_is_not_fetched_and_what_is_read_is_not_written() {
        let var = candle_core::Var::new(&[7u32, 8], &Device::Cpu).unwrap();
        let mut stage = StagedTensor::over(&var, false);
        assert_eq!(stage.read(0..8, <[u8]>::to_vec).unwrap(), [0; 8]);
        stage.write(0..8, |bytes| bytes.copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0])).unwrap();
        stage.finish().unwrap();
        assert_eq!(var.to_vec1::<u32>().unwrap(), [1, 2]);

        let scalar = Tensor::new(5u8, &Device::Cpu).unwrap();
        let stage = StagedTensor::over(&scalar, true);
        assert_eq!(stage.read(0..1, <[u8]>::to_vec).unwrap(), [5]);
        stage.finish().unwrap();
        assert_eq!(scalar.to_scalar::<u8>().unwrap(), 5);
    }
}
