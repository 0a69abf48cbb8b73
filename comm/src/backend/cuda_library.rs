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
/// use comm::launcher::CudaLibrary;
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
            Some(name) => {
                let library = open(name).map_err(|reason| self.missing(name, &reason))?;
                if let CudaLibrary::Driver = self { check_version(driver_version(library)) } else { Ok(()) }
            }
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

/// The lowest version of CUDA that the driver must support: 1000 times the major number, plus 10 times the minor one.
const DRIVER_VERSION: i32 = 13_000;

/// Refuses a driver that is too old, which would otherwise be an error of the first library that needs it.
fn check_version(version: Option<i32>) -> Result<()> {
    match version.filter(|version| *version < DRIVER_VERSION) {
        Some(old) => {
            let (major, minor) = (old / 1000, old % 1000 / 10);
            let problem = format!(
                "it is for CUDA {major}.{minor} at most, and 13.0 is needed; install driver 580 or later"
            );
            Err(Error::system("NVIDIA's driver is too old", problem))
        }
        None => Ok(()),
    }
}

/// Returns the version of CUDA that the driver supports; None where it does not tell.
fn driver_version(driver: *mut std::ffi::c_void) -> Option<i32> {
    // SAFETY: the handle is that of an open library, and the name a C string.
    let function = unsafe { libc::dlsym(driver, c"cuDriverGetVersion".as_ptr()) };
    if function.is_null() {
        return None;
    }
    // SAFETY: the driver's function of this name has this type, and needs no initialisation.
    let function: extern "C" fn(*mut i32) -> i32 = unsafe { std::mem::transmute(function) };
    let mut version = 0;
    (function(&raw mut version) == 0).then_some(version)
}

/// Opens the library and keeps it open for the rest of the program. Returns its handle.
fn open(name: &str) -> std::result::Result<*mut std::ffi::c_void, String> {
    use std::ffi::{CStr, CString};

    let name = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the name is a C string. The library's initialisers run when it is loaded; asking for CUDA means trusting
    // NVIDIA's software that they are sound.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
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
        let library = open("libc.so.6").unwrap();
        assert_eq!(driver_version(library), None);
    }

    #[test]
    fn a_driver_that_is_too_old_is_named() {
        assert!(check_version(None).is_ok() && check_version(Some(13_010)).is_ok());
        let line = check_version(Some(12_040)).unwrap_err().to_string();
        assert!(line.contains("driver is too old: it is for CUDA 12.4 at most"), "{line}");
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
