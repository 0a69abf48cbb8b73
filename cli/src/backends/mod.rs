//! Communication backends (NCCL, TCP, MPI): whether each is compiled in, usable on this machine, and what is missing.

mod choice;

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

pub use choice::connect;
pub(crate) use choice::{check, config};

use launch::machine::{gpu_count, in_path};

/// Folders searched for shared libraries, in addition to those of `LD_LIBRARY_PATH`.
const LIBRARY_FOLDERS: [&str; 8] = [
    "/usr/local/cuda/lib64", "/usr/local/lib", "/usr/lib64", "/usr/lib", "/lib64", "/lib",
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
];

/// Availability of one backend in this build and on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct BackendAvailability {
    /// Its name in capitals: `TCP`.
    pub name: &'static str,
    /// Whether this build includes it.
    pub compiled: bool,
    /// The version of its library, where known.
    pub version: Option<String>,
    /// What prevents its use here; empty if it can be used.
    pub missing: Vec<&'static str>,
}

impl BackendAvailability {
    /// Whether it can be used here.
    pub fn available(&self) -> bool {
        self.missing.is_empty()
    }
}

/// `NCCL available: False (not compiled in; missing: ..)`, with Python's booleans, as the tutorial prints them.
impl fmt::Display for BackendAvailability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available = if self.available() { "True" } else { "False" };
        let compiled = if self.compiled { "compiled in" } else { "not compiled in" };
        write!(f, "{} available: {available} ({compiled}", self.name)?;
        match &self.version {
            Some(version) => write!(f, "; version {version}")?,
            None => f.write_str("; no version of it found here")?,
        }
        if !self.missing.is_empty() {
            write!(f, "; missing: {}", self.missing.join(", "))?;
        }
        f.write_str(")")
    }
}

/// Returns all three backends, examined on this machine.
pub fn detect_backends() -> [BackendAvailability; 3] {
    [nccl(), tcp(), mpi()]
}

fn nccl() -> BackendAvailability {
    let library = library("libnccl.so.");
    let compiled = cfg!(feature = "nccl");
    let mut missing = Vec::new();
    missing.extend((!compiled).then_some("a build with NCCL"));
    missing.extend((gpu_count() == 0).then_some("an NVIDIA GPU"));
    missing.extend(choice::nccl_missing_libraries());
    BackendAvailability { name: "NCCL", compiled, version: choice::nccl_version().or(library), missing }
}

/// TCP, the counterpart of Gloo in the tutorial.
fn tcp() -> BackendAvailability {
    BackendAvailability {
        name: "TCP",
        compiled: true,
        version: Some(env!("CARGO_PKG_VERSION").into()),
        missing: Vec::new(),
    }
}

fn mpi() -> BackendAvailability {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let mpirun = in_path(OsStr::new("mpirun"), &search).or_else(|| in_path(OsStr::new("mpiexec"), &search));
    let library = library("libmpi.so.").or_else(|| library("libmpich.so."));
    let compiled = cfg!(feature = "mpi");
    let mut missing = Vec::new();
    missing.extend((!compiled).then_some("a build with MPI"));
    // A build with MPI would not have started without the library.
    missing.extend((library.is_none() && !compiled).then_some("libmpi.so"));
    missing.extend(mpirun.is_none().then_some("mpirun"));
    BackendAvailability { name: "MPI", compiled, version: choice::mpi_version().or(library), missing }
}

/// Returns the version in a shared library's file name (`2.27.3` for `libnccl.so.2.27.3`); the longest, if several
/// are found.
fn library(prefix: &str) -> Option<String> {
    let own = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let own: Vec<_> = std::env::split_paths(&own).filter(|path| path.is_absolute()).collect();
    let folders = own.iter().map(|path| path.as_path()).chain(LIBRARY_FOLDERS.iter().map(Path::new));
    folders.filter_map(|folder| version_in(folder, prefix)).max_by_key(String::len)
}

fn version_in(folder: &Path, prefix: &str) -> Option<String> {
    let names = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name());
    let versions = names.filter_map(|name| Some(name.to_str()?.strip_prefix(prefix)?.to_string()));
    versions.filter(|version| version.starts_with(|c: char| c.is_ascii_digit())).max_by_key(String::len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_is_always_there_and_the_others_say_what_is_missing() {
        for backend in detect_backends() {
            assert!(backend.available() || backend.name != "TCP", "{backend:?}");
            assert!(backend.compiled || !backend.available(), "{backend:?}");
            assert!(backend.compiled || !backend.missing.is_empty(), "{backend:?}");
        }
    }

    #[test]
    fn a_back_end_is_one_line() {
        let version = Some("2.27.3".to_string());
        let missing = vec!["a build with NCCL", "an NVIDIA GPU"];
        let nccl = BackendAvailability { name: "NCCL", compiled: false, version, missing };
        let expected = "NCCL available: False (not compiled in; version 2.27.3; missing: a build with NCCL, an NVIDIA GPU)";
        assert_eq!(nccl.to_string(), expected);
        let mpi = BackendAvailability { name: "MPI", compiled: true, version: None, missing: Vec::new() };
        assert_eq!(mpi.to_string(), "MPI available: True (compiled in; no version of it found here)");
    }

    #[test]
    fn a_version_is_read_from_a_librarys_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            ["libnccl.so", "libnccl.so.2", "libnccl.so.2.27.3", "libnccl.so.old", "libother.so.9.9.9.9"]
        {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(version_in(folder.path(), "libnccl.so.").as_deref(), Some("2.27.3"));
        assert_eq!(version_in(folder.path(), "libmpi.so."), None);
        assert_eq!(version_in(&folder.path().join("none"), "libnccl.so."), None);
    }
}
