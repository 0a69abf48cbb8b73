//! Selecting the CUDA or Metal device of this process.

use candle_core::Device;

use crate::error::Error;

/// Returns this rank's CUDA device, chosen by local rank; ranks beyond the number of devices share them.
///
/// # Errors
/// A build without CUDA, a machine without a GPU or NVIDIA's libraries, a GPU that cannot be used.
pub(crate) fn cuda() -> Result<Device, Error> {
    #[cfg(feature = "cuda")]
    let device = with_cuda::device();
    #[cfg(not(feature = "cuda"))]
    let device = Err(NOT_BUILT);
    device.map_err(unavailable)
}

/// Checks that a CUDA device and the libraries it needs are present, without opening the device.
///
/// # Errors
/// Those of [`cuda`], except for a GPU that cannot be opened.
pub(crate) fn check_cuda() -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    let found = with_cuda::find().map(drop);
    #[cfg(not(feature = "cuda"))]
    let found = Err(NOT_BUILT);
    found.map_err(unavailable)
}

#[cfg(not(feature = "cuda"))]
const NOT_BUILT: &str = "this build does not include CUDA; build with --features cuda, which needs nvcc, or with \
                         scripts/build-cuda.sh, or use --device cpu";

fn unavailable(help: impl ToString) -> Error {
    Error::Unavailable { wanted: "--device cuda".into(), help: help.to_string() }
}

/// Returns Apple's GPU, which all ranks of a machine share. The same `Device` on each call: tensors of two `Device`s
/// cannot be mixed.
///
/// # Errors
/// A build without Metal, or a machine without such a GPU.
pub(crate) fn metal() -> Result<Device, Error> {
    #[cfg(feature = "metal")]
    let device = with_metal::device();
    #[cfg(not(feature = "metal"))]
    let device =
        Err("this build does not include Metal; build on a Mac with --features metal, or use --device cpu");
    device.map_err(|help| Error::Unavailable { wanted: "--device metal".into(), help: help.to_string() })
}

/// Returns a CUDA device if this build and this machine have one, else the CPU.
pub(crate) fn any() -> Device {
    #[cfg(feature = "cuda")]
    let device = with_cuda::usable_device().unwrap_or(Device::Cpu);
    #[cfg(not(feature = "cuda"))]
    let device = Device::Cpu;
    device
}

/// Returns the device's name as `--device` spells it.
pub(crate) fn name(device: &Device) -> &'static str {
    match device {
        Device::Cpu => "cpu",
        Device::Cuda(_) => "cuda",
        Device::Metal(_) => "metal",
    }
}

#[cfg(feature = "cuda")]
pub(crate) use with_cuda::count as cuda_count;

#[cfg(feature = "cuda")]
mod with_cuda {
    use std::sync::{Once, OnceLock};

    use candle_core::Device;
    use candle_core::cuda::cudarc::driver::{DriverError, result};
    use comm::launcher::CudaLibrary;

    use crate::console::note;
    use launch::machine::gpu_count;
    use training::internal::first_line;

    const ALTERNATIVE: &str = "use --device cpu";

    /// Returns the same `Device` on each call: tensors of two `Device`s cannot be mixed, even if both are the same GPU.
    pub(super) fn device() -> Result<Device, String> {
        static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
        DEVICE.get_or_init(open).clone()
    }

    /// Returns the CUDA device if it can be used. If the machine has a GPU that cannot be used, prints the reason,
    /// once.
    pub(super) fn usable_device() -> Option<Device> {
        static TOLD: Once = Once::new();
        match device() {
            Ok(device) => Some(device),
            Err(_) if gpu_count() == 0 => None,
            Err(reason) => {
                TOLD.call_once(|| note(format_args!("CUDA is not used: {reason}")));
                None
            }
        }
    }

    /// Returns the number of devices (at least 1), after checking that the libraries they need can be loaded.
    pub(super) fn find() -> Result<usize, String> {
        let gpus = count(ALTERNATIVE)?;
        for library in [CudaLibrary::Cublas, CudaLibrary::Curand] {
            library.load().map_err(|error| format!("{error}, or {ALTERNATIVE}"))?;
        }
        Ok(gpus)
    }

    fn open() -> Result<Device, String> {
        let gpus = find()?;
        let place = comm::LaunchedRank::from_env().ok().flatten();
        let ordinal = place.and_then(|place| place.local_rank).unwrap_or(0) % gpus;
        comm::open_cuda_device(ordinal).map_err(|error| {
            format!("CUDA device {ordinal} cannot be used: {}; {ALTERNATIVE}", first_line(error))
        })
    }

    /// Returns how many GPUs the driver makes available to this process; at least 1.
    ///
    /// # Errors
    /// The first thing that is missing, with `alternative` as the suggested way out.
    pub(crate) fn count(alternative: &str) -> Result<usize, String> {
        CudaLibrary::Driver.load().map_err(|error| match gpu_count() {
            0 => format!("no NVIDIA GPU was found here, and {error}, or {alternative}"),
            _ => format!("{error}, or {alternative}"),
        })?;
        let counted = result::init().and_then(|()| result::device::get_count());
        match counted.map(usize::try_from) {
            Ok(Ok(count)) if count > 0 => Ok(count),
            Err(error) if gpu_count() > 0 => {
                let why = driver_message(error);
                Err(format!(
                    "NVIDIA's driver cannot be used: {why}; see what nvidia-smi says, or {alternative}"
                ))
            }
            _ => Err(match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(names) => format!(
                    "CUDA_VISIBLE_DEVICES is '{names}', which names no NVIDIA GPU here; {alternative}"
                ),
                Err(_) => format!("no NVIDIA GPU was found here; {alternative}"),
            }),
        }
    }

    /// Returns the driver's own description of an error.
    fn driver_message(error: DriverError) -> String {
        let words = error.error_string().map(|text| text.to_string_lossy().into_owned());
        words.unwrap_or_else(|_| format!("{:?}", error.0))
    }
}

#[cfg(feature = "metal")]
mod with_metal {
    use std::sync::OnceLock;

    use candle_core::Device;

    use training::internal::first_line;

    pub(super) fn device() -> Result<Device, String> {
        static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
        DEVICE.get_or_init(open).clone()
    }

    /// candle panics if the system has no Metal device, as in some virtual machines.
    fn open() -> Result<Device, String> {
        let opened = std::panic::catch_unwind(|| Device::new_metal(0));
        let reason = match opened {
            Ok(Ok(device)) => return Ok(device),
            Ok(Err(error)) => first_line(error),
            Err(_) => "this machine has none".into(),
        };
        Err(format!("Apple's GPU cannot be used: {reason}; use --device cpu"))
    }
}
