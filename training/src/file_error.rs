//! Errors about files that a user names: one line each, which names the path.

use std::path::{Path, PathBuf};

/// Why a file that a user names cannot be used: one line, which names the path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
    /// It cannot be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
    /// It is not a complete safetensors file.
    #[error("{} is not a whole safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor is not in the file.
    #[error("{} has no tensor `{name}` ({expected}); it holds {held}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The missing tensor.
        name: String,
        /// Its dtype and shape.
        expected: String,
        /// The names of the tensors in the file.
        held: String,
    },
    /// The file has an unexpected tensor.
    #[error("{} has an unexpected tensor `{name}` ({got}); expected are only {wanted}", path.display())]
    ExtraTensor {
        /// The file.
        path: PathBuf,
        /// The unexpected tensor.
        name: String,
        /// Its dtype and shape.
        got: String,
        /// The names that are expected.
        wanted: String,
    },
    /// The file has a tensor that the model has not.
    #[error("{} has a tensor `{name}` ({got}) that the model has not", path.display())]
    NotOfModel {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its dtype and shape.
        got: String,
    },
    /// A tensor has the wrong dtype or shape.
    #[error("{}: tensor `{name}` is {got}, expected {expected}", path.display())]
    TensorMismatch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The expected dtype and shape.
        expected: String,
        /// The dtype and shape in the file.
        got: String,
    },
    /// A tensor could not be loaded into memory or onto its device.
    #[error("{}: tensor `{name}`: {reason}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Candle's reason.
        reason: String,
    },
}

impl FileError {
    /// Returns the error for a file that cannot be read.
    pub fn read(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Read { path: path.to_path_buf(), reason: first_line(reason) }
    }

    /// Returns the error for a file that cannot be written.
    pub fn write(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Write { path: path.to_path_buf(), reason: first_line(reason) }
    }

    /// Returns the error for a tensor that cannot be used.
    pub fn tensor(path: &Path, name: &str, reason: impl std::fmt::Display) -> Self {
        Self::Tensor { path: path.to_path_buf(), name: name.to_string(), reason: first_line(reason) }
    }
}

/// Returns the first line of an error: candle's errors print a backtrace below the message if RUST_BACKTRACE is set.
pub fn first_line(reason: impl std::fmt::Display) -> String {
    reason.to_string().lines().next().unwrap_or_default().to_string()
}
