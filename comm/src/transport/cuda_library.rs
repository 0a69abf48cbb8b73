//! NVIDIA's libraries in a build that opens them at run time, when they are needed (`scripts/build-cuda.sh`).

#![allow(unsafe_code, reason = "the system's loader is a C library, and what it opens runs code of its own")]

use crate::{Error, Result};

/// Names of the libraries that such a build opens, separated by spaces, in the order of [`CudaLibrary`]: the driver,
/// cuBLAS, cuRAND, NCCL. None in a build that was linked with the libraries, which does not start without them.
const OPENED_LATE: Option<&str> = option_env!("GIRANDOLE_CUDA_LIBRARIES");

/// An NVIDIA library that CUDA devices or NCCL need.
///
/// ```no_run
/// # #[cfg(feature = "cuda")] {
/// use comm::CudaLibrary;
///
/// CudaLibrary::Driver.load()?;
/// # }
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CudaLibrary {
    /// Installed with the NVIDIA driver of the system.
    Driver,
    /// Matrix products.
    Cublas,
    /// Random numbers.
    Curand,
    /// Collectives.
    Nccl,
}

impl CudaLibrary {
    /// Makes sure that the library's functions can be called. Does nothing where the program was linked with it.
    ///
    /// # Errors
    /// A library that is missing or cannot be used; the error says what to do.
    pub fn load(self) -> Result<()> {
        match self.name() {
            Some(name) => open(name).map_err(|reason| self.missing(name, &reason)),
            None => Ok(()),
        }
    }

    /// Returns the library's file name; None where the program was linked with it.
    fn name(self) -> Option<&'static str> {
        OPENED_LATE?.split(' ').nth(self as usize)
    }

    fn missing(self, name: &str, reason: &str) -> Error {
        let what = match self {
            CudaLibrary::Driver => "of NVIDIA's driver",
            CudaLibrary::Cublas | CudaLibrary::Curand => "of CUDA",
            CudaLibrary::Nccl => "of NCCL",
        };
        // The loader's message begins with the name, which the error already contains.
        let reason = reason.strip_prefix(name).map_or(reason, |rest| rest.trim_start_matches([':', ' ']));
        let help = match self {
            CudaLibrary::Driver => "install the driver",
            _ => {
                "put its folder into LD_LIBRARY_PATH, or get it from PyPI (see \"CUDA and NCCL\" in the guide)"
            }
        };
        Error::system(format!("{name} {what} cannot be loaded"), format!("{reason}; {help}"))
    }
}

/// Opens the library and keeps it open for the rest of the program.
fn open(name: &str) -> std::result::Result<(), String> {
    use std::ffi::{CStr, CString};

    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the name is a C string. The library's initialisers run when it is loaded; asking for CUDA means trusting
    // NVIDIA's software that they are sound.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: no arguments.
    let reason = unsafe { libc::dlerror() };
    if reason.is_null() {
        return Err("no reason is known".into());
    }
    // SAFETY: a C string owned by the loader, valid on this thread until its next call of the loader.
    Err(unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_that_is_not_here_is_one_line_that_says_what_to_do() {
        let reason = open("libnone.so.1").unwrap_err();
        assert!(reason.contains("libnone.so.1"), "{reason}");
        let line = CudaLibrary::Cublas.missing("libnone.so.1", &reason).to_string();
        assert!(line.starts_with("libnone.so.1 of CUDA cannot be loaded: cannot open"), "{line}");
        assert!(line.contains("LD_LIBRARY_PATH") && !line.contains('\n'), "{line}");
        let driver = CudaLibrary::Driver.missing("libnone.so.1", "no").to_string();
        assert_eq!(driver, "libnone.so.1 of NVIDIA's driver cannot be loaded: no; install the driver");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_that_is_here_is_opened() {
        open("libc.so.6").unwrap();
    }

    #[test]
    fn a_build_that_is_linked_with_them_opens_nothing() {
        if OPENED_LATE.is_none() {
            for library in [CudaLibrary::Driver, CudaLibrary::Cublas, CudaLibrary::Curand, CudaLibrary::Nccl]
            {
                assert_eq!(library.name(), None);
                library.load().unwrap();
            }
        }
    }
}
