//! Selecting a backend by `--backend`: availability checks, configuration and connecting.

use std::sync::Arc;

use candle_core::Device;
use comm::{Communicator, Tcp, TcpConfig};

use crate::error::{Error, Result};
use crate::options::{Backend, RankOptions};

/// Checks that the selected backend can be used in this build on this machine.
///
/// # Errors
/// A missing feature, library or launcher.
pub(crate) fn check(options: &RankOptions) -> Result<()> {
    match options.backend {
        Backend::Auto | Backend::Tcp => Ok(()),
        Backend::Nccl => nccl::check(),
        Backend::Mpi => mpi::check(options),
    }
}

/// Returns the configuration of this rank if the backend provides it (MPI); `None` if it comes from the environment.
///
/// # Errors
/// Errors of the backend's library; options that contradict it.
pub(crate) fn config(options: &RankOptions) -> Result<Option<TcpConfig>> {
    match options.backend {
        Backend::Mpi => mpi::config(options).map(Some),
        _ => Ok(None),
    }
}

/// Joins the group of all ranks, with tensors on `device`.
///
/// # Errors
/// Those of the backend.
pub fn connect(backend: Backend, device: &Device, config: &TcpConfig) -> Result<Arc<dyn Communicator>> {
    match backend {
        Backend::Mpi => mpi::connect(config),
        Backend::Nccl => nccl::connect(device, config),
        // NCCL groups cannot lose ranks and continue.
        Backend::Auto if config.elastic.is_none() => nccl::connect_or_tcp(device, config),
        _ => Ok(Arc::new(Tcp::connect(config)?)),
    }
}

/// Returns the version of the MPI library that this build uses.
pub(crate) fn mpi_version() -> Option<String> {
    mpi::version()
}

/// Returns the version of the NCCL library that this build uses.
pub(crate) fn nccl_version() -> Option<String> {
    nccl::version()
}

/// Returns the NVIDIA libraries that NCCL needs and that are missing here.
pub(crate) fn nccl_missing_libraries() -> Vec<&'static str> {
    nccl::missing_libraries()
}

fn unavailable<T>(wanted: &str, help: String) -> Result<T> {
    Err(Error::Unavailable { wanted: wanted.into(), help })
}

#[cfg(feature = "mpi")]
mod mpi {
    use comm::Mpi;

    use super::{Arc, Communicator, Error, RankOptions, Result, TcpConfig, unavailable};

    pub(super) fn check(_: &RankOptions) -> Result<()> {
        if Mpi::is_launched() {
            return Ok(());
        }
        let help = format!(
            "no launcher of MPI has started this process; run it under that of {}: mpirun -n 2 girandole ...",
            Mpi::version()
        );
        unavailable("--backend mpi", help)
    }

    pub(super) fn config(options: &RankOptions) -> Result<TcpConfig> {
        if let Some(method) = &options.init_method {
            let help = "MPI ranks meet through MPI; leave the option out".into();
            return Err(Error::Option { option: "--init-method", got: method.to_string(), help });
        }
        let mut config = Mpi::config()?;
        if let Some(timeout) = options.timeout {
            config.timeout = timeout;
        }
        options.transport.apply(&mut config);
        if let Some(world_size) = options.world_size.filter(|given| *given != config.world_size) {
            let help =
                format!("MPI has started {} ranks (mpirun -n); leave the option out", config.world_size);
            return Err(Error::Option { option: "--world-size", got: world_size.to_string(), help });
        }
        Ok(config)
    }

    pub(super) fn connect(config: &TcpConfig) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Mpi::connect(config)?))
    }

    pub(super) fn version() -> Option<String> {
        Some(Mpi::version())
    }
}

#[cfg(not(feature = "mpi"))]
mod mpi {
    use super::{Arc, Communicator, RankOptions, Result, TcpConfig, unavailable};

    pub(super) fn check(_: &RankOptions) -> Result<()> {
        let help = "this build does not include MPI; build with --features mpi, which needs Open MPI or MPICH with headers, \
                    and libclang; or use --backend tcp";
        unavailable("--backend mpi", help.into())
    }

    pub(super) fn config(options: &RankOptions) -> Result<TcpConfig> {
        check(options).map(|()| TcpConfig::default())
    }

    pub(super) fn connect(_: &TcpConfig) -> Result<Arc<dyn Communicator>> {
        unavailable("--backend mpi", "this build does not include MPI".into())
    }

    pub(super) fn version() -> Option<String> {
        None
    }
}

#[cfg(feature = "nccl")]
mod nccl {
    use comm::Nccl;
    use comm::launcher::CudaLibrary;

    use crate::devices::cuda_count;

    use super::{Arc, Communicator, Device, Result, TcpConfig, unavailable};

    const ALTERNATIVE: &str = "use --backend tcp";

    pub(super) fn check() -> Result<()> {
        let library = || CudaLibrary::Nccl.load().map_err(|error| format!("{error}, or {ALTERNATIVE}"));
        cuda_count(ALTERNATIVE).and_then(|_| library()).or_else(|help| unavailable("--backend nccl", help))
    }

    pub(super) fn connect_or_tcp(device: &Device, config: &TcpConfig) -> Result<Arc<dyn Communicator>> {
        Ok(Nccl::connect_or_tcp(config, device)?)
    }

    pub(super) fn connect(device: &Device, config: &TcpConfig) -> Result<Arc<dyn Communicator>> {
        if !device.is_cuda() {
            let help = "NCCL exchanges tensors on CUDA devices, but these are on the CPU: give --device cuda if the command \
                        has it, or use --backend tcp";
            return unavailable("--backend nccl", help.into());
        }
        Ok(Arc::new(Nccl::connect(config, device)?))
    }

    pub(super) fn version() -> Option<String> {
        Nccl::version()
    }

    /// Only those that this build loads at run time, on first use.
    pub(super) fn missing_libraries() -> Vec<&'static str> {
        let all = [(CudaLibrary::Driver, "libcuda.so.1"), (CudaLibrary::Nccl, "libnccl.so.2")];
        all.into_iter().filter(|(library, _)| library.load().is_err()).map(|(_, name)| name).collect()
    }
}

#[cfg(not(feature = "nccl"))]
mod nccl {
    use super::{Arc, Communicator, Device, Result, Tcp, TcpConfig, unavailable};

    pub(super) fn check() -> Result<()> {
        let help = "this build does not include NCCL; build with --features nccl, which needs CUDA, NCCL and nvcc; or use \
                    --backend tcp";
        unavailable("--backend nccl", help.into())
    }

    pub(super) fn connect_or_tcp(_: &Device, config: &TcpConfig) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Tcp::connect(config)?))
    }

    pub(super) fn connect(_: &Device, _: &TcpConfig) -> Result<Arc<dyn Communicator>> {
        check()?;
        unavailable("--backend nccl", "this build does not include NCCL".into())
    }

    pub(super) fn version() -> Option<String> {
        None
    }

    pub(super) fn missing_libraries() -> Vec<&'static str> {
        let here = crate::backends::library("libnccl.so.").is_some();
        if here { Vec::new() } else { vec!["libnccl.so.2"] }
    }
}
