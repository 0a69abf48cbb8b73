//! The CUDA device of this process.

use candle_core::Device;

use crate::error::Error;

/// One device a rank; ranks beyond the number of devices share them.
///
/// # Errors
/// A build without CUDA, a machine without a GPU, a GPU that cannot be used.
pub(crate) fn cuda() -> Result<Device, Error> {
    #[cfg(feature = "cuda")]
    let device = with_cuda::device();
    #[cfg(not(feature = "cuda"))]
    let device = Err(
        "this build has no CUDA in it; build it with --features cuda, for which nvcc must be there, or use --device cpu",
    );
    device.map_err(|help| Error::Unavailable { wanted: "--device cuda".into(), help: help.to_string() })
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::sync::OnceLock;

    use candle_core::Device;

    use crate::launch::gpu_count;

    /// Always the same one: tensors of two devices do not mix, not even where both are one GPU.
    pub(super) fn device() -> Result<Device, String> {
        static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
        DEVICE.get_or_init(open).clone()
    }

    fn open() -> Result<Device, String> {
        let gpus = gpu_count();
        if gpus == 0 {
            return Err("no NVIDIA GPU was found here; use --device cpu".into());
        }
        let place = comm::Place::from_env().ok().flatten();
        let ordinal = place.and_then(|place| place.local_rank).unwrap_or(0) % gpus;
        Device::new_cuda_with_stream(ordinal)
            .map_err(|error| format!("CUDA device {ordinal} cannot be used: {error}; use --device cpu"))
    }
}
