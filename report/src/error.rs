//! The crate's one error type.

use std::path::{Path, PathBuf};

/// Why there is no report, trace or file of metrics.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A plot could not be drawn.
    #[error("report: cannot draw `{chart}`: {reason}")]
    Plot {
        /// The plot's title.
        chart: String,
        /// What is wrong.
        reason: String,
    },
    /// A page could not be put together.
    #[error("report: {reason}")]
    Page {
        /// What is wrong.
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
    /// Logging can be set up once in a process.
    #[error("logging has been set up before in this process; set it up once, before anything is logged")]
    AlreadyInstalled,
    /// What a rank recorded is no trace.
    #[error("the trace of rank {rank} ({host}) cannot be read: {reason}")]
    Malformed {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// What is wrong.
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

/// Writes a page whole, or leaves an older one as it was; a device or pipe gets the bytes as they are.
pub(crate) fn write_page(path: &Path, html: &str) -> Result<()> {
    training::write_output(path, html.as_bytes()).map_err(|error| Error::write(path, error))
}
