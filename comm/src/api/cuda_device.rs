//! CUDA devices for training.

#![allow(unsafe_code, reason = "cudarc's events are turned off")]

use candle_core::{Device, Result};

/// Opens a CUDA device for training: with a stream of its own, and without the events by which cudarc orders several streams.
/// These take several calls of the driver for each operation, more time than to launch it.
///
/// Everything that candle and this crate do with the device's tensors is ordered without them: candle uses the device's one
/// stream, and an operation of a [`Communicator`](crate::Communicator) waits for what was enqueued there and is over when it
/// has ended. A program that uses other streams for the same tensors makes its device by candle's
/// `Device::new_cuda_with_stream`.
///
/// # Errors
/// candle's, for a device that there is not or that cannot be used.
///
/// ```no_run
/// # #[cfg(feature = "cuda")] {
/// let device = comm::open_cuda_device(0)?;
/// let tensor = candle_core::Tensor::ones(4, candle_core::DType::F32, &device)?;
/// # }
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn open_cuda_device(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    if let Device::Cuda(cuda) = &device {
        // SAFETY: candle enqueues everything, allocation and release included, in the device's one stream. This crate's copies
        // and NCCL's calls are in other streams; they begin after an event of that stream (`Before`), hold their tensors until
        // they have ended, and the host waits for their end before it goes on.
        unsafe { cuda.disable_event_tracking() };
    }
    Ok(device)
}
