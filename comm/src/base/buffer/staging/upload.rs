//! Copying tensors to a CUDA device through pinned memory.

use candle_core::{Device, Tensor};

use super::{StagedTensor, failed, stream_of};
use crate::base::buffer::host;
use crate::base::fingerprint;

/// Copies a CPU tensor to a device, through pinned memory if it is a CUDA device.
pub(crate) fn upload(tensor: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    let Device::Cuda(cuda) = device else { return tensor.to_device(device) };
    // Of other dtypes the bytes cannot be read.
    if !fingerprint::supports(tensor.dtype()) {
        return tensor.to_device(device);
    }
    let (tensor, output) = (tensor.contiguous()?, Tensor::zeros(tensor.shape(), tensor.dtype(), device)?);
    let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
    let Some(mut stage) = StagedTensor::of(&output, false).filter(|_| bytes > 0) else { return Ok(output) };
    // The zeros are written on the device's own stream, and the copy is made on another.
    let made = cuda.cuda_stream().record_event(None).map_err(failed)?;
    stream_of(cuda).and_then(|stream| stream.wait(&made)).map_err(failed)?;
    host::read(&tensor, 0..bytes, |from| stage.write(0..bytes, |to| to.copy_from_slice(from)))??;
    stage.finish()?;
    Ok(output)
}
