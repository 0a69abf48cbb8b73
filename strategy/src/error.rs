//! The crate's error type.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::ParameterDifference;

/// An error of what the strategies share.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that is not valid.
    #[error("{what}: got {got}; {help}")]
    Invalid {
        /// What it is.
        what: String,
        /// Its value.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// A checkpoint or another file that cannot be used.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// Another rank failed, and not this one.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// Its global rank.
        rank: usize,
        /// Its error message.
        reason: String,
    },
    /// A gradient contains a NaN or an infinity. Every rank returns this same error.
    #[error(
        "the gradient of parameter {parameter} on rank {rank} is not finite, all gradients together have a norm of {norm}; none was \
         changed: skip the step, or look for the cause"
    )]
    NotFinite {
        /// The first such parameter on that rank.
        parameter: String,
        /// The first rank that has such a gradient; rank in the whole job.
        rank: usize,
        /// The norm of all gradients together.
        norm: f64,
    },
    /// The values of a parameter, or of a part of it, differ between ranks that hold the same. Every rank returns this same
    /// error, and may continue.
    #[error(transparent)]
    ParametersDiffer(Box<ParameterDifference>),
    /// An error of `training`: of an optimizer or a tensor file.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// An error of candle.
    #[error(transparent)]
    Candle(Arc<candle_core::Error>),
    /// An error of `comm`.
    #[error(transparent)]
    Comm(#[from] comm::Error),
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

crate::error_conversions!(@shared Error);

impl From<candle_core::Error> for Error {
    fn from(source: candle_core::Error) -> Self {
        comm::internal::carried_as(&source).unwrap_or_else(|| Self::Candle(Arc::new(source)))
    }
}

impl Error {
    /// An argument that cannot be used: what it is, what was given, and what to give.
    pub fn invalid(what: impl Into<String>, got: impl ToString, help: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), got: got.to_string(), help: help.into() }
    }

    pub(crate) fn file(path: &Path, problem: impl ToString) -> Self {
        Self::File { path: path.into(), problem: problem.to_string() }
    }

    /// Whether another rank failed, and not this one.
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Self::Comm(error) => error.is_peer_failure(),
            Self::PeerFailed { .. } => true,
            _ => false,
        }
    }
}

/// Implements the conversions of a strategy's error type: to candle's error and to `comm`'s, and from those of `training`, `comm`
/// and this crate. It has the variants `Comm`, `Training` (in an `Arc`) and `Strategy` for them.
#[macro_export]
macro_rules! error_conversions {
    ($error:ident) => {
        $crate::error_conversions!(@shared $error);

        impl From<$crate::Error> for $error {
            fn from(error: $crate::Error) -> Self {
                match error {
                    $crate::Error::Comm(error) => error.into(),
                    $crate::Error::Training(error) => $error::Training(error),
                    other => $error::Strategy(other),
                }
            }
        }
    };
    (@shared $error:ident) => {
        impl From<$error> for ::candle_core::Error {
            fn from(error: $error) -> Self {
                match error {
                    // Carried as a `comm::Error`, so that code that does not know the crate can detect that another rank
                    // failed.
                    $error::Comm(error) => ::comm::carry(error),
                    other => ::comm::carry(other),
                }
            }
        }

        impl From<$error> for ::comm::Error {
            fn from(error: $error) -> Self {
                match error {
                    $error::Comm(error) => error,
                    other => ::candle_core::Error::from(other).into(),
                }
            }
        }

        impl From<::training::Error> for $error {
            fn from(error: ::training::Error) -> Self {
                // From a layer that communicates, in backward.
                let carried = match &error {
                    ::training::Error::Candle(source) => ::comm::internal::carried_as(source),
                    _ => None,
                };
                carried.unwrap_or_else(|| $error::Training(::std::sync::Arc::new(error)))
            }
        }

        impl From<::training::FileError> for $error {
            fn from(error: ::training::FileError) -> Self {
                ::training::Error::from(error).into()
            }
        }
    };
}
