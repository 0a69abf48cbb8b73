//! Tensors on their way to a device.

use candle_core::{Device, Tensor};

use crate::base::buffer::staging;

/// A tensor of the CPU on another device. Numbers go to a CUDA device from page-locked memory, which it reads by itself, over a stream
/// of their own; the thread waits until they are there. On the CPU the tensor itself.
///
/// # Cost
/// A copy into memory that stays locked for the next call, and one to the device. To lock more takes milliseconds.
///
/// # Errors
/// Those of the device.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
/// assert_eq!(comm::upload_pinned(&x, &Device::Cpu)?.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn upload_pinned(tensor: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    staging::upload(tensor, device)
}
