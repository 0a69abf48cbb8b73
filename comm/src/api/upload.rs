//! Copying tensors to a device.

use candle_core::{Device, Tensor};

use crate::base::buffer::staging;

/// Copies a CPU tensor to another device. A CUDA device reads it from page-locked memory, on a separate stream; the
/// calling thread waits until the copy is complete. If `device` is the CPU, returns the tensor itself.
///
/// # Cost
/// For CUDA, a copy into page-locked memory, which is kept for later calls, and one to the device. Locking more memory
/// takes milliseconds.
///
/// # Errors
/// Those of the device.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// assert_eq!(comm::internal::upload_pinned(&x, &Device::Cpu)?.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn upload_pinned(tensor: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    staging::upload(tensor, device)
}
