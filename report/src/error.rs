//! The error type of this crate.

use std::path::{Path, PathBuf};

/// An error from writing a report, trace or metrics file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A plot could not be drawn.
    #[error("report: cannot draw `{chart}`: {reason}")]
    Plot {
        /// The plot's title.
        chart: String,
        /// The reason.
        reason: String,
    },
    /// A page could not be rendered.
    #[error("report: {reason}")]
    Page {
        /// The reason.
        reason: String,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
    /// Logging can only be set up once in a process.
    #[error("logging has been set up before in this process; set it up once, before anything is logged")]
    AlreadyInstalled,
    /// The data that a rank recorded is not a trace.
    #[error("the trace of rank {rank} ({host}) cannot be read: {reason}")]
    Malformed {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The reason.
        reason: String,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn write(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Write { path: path.to_path_buf(), reason: reason.to_string() }
    }
}

/// Writes a page to a file, which then has either the whole page or its old content; a device or pipe gets the bytes
/// directly.
pub(crate) fn write_page(path: &Path, html: &str) -> Result<()> {
    training::internal::write_output(path, html.as_bytes()).map_err(|error| Error::write(path, error))
}
