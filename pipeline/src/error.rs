//! The crate's one error type.

use std::sync::Arc;

/// What can go wrong in a pipeline. Errors are `Clone`: a [`crate::Pipeline`] that failed answers every later call with the
/// first cause.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes in the program ----
    /// An argument that cannot be used.
    #[error("{what}: got {got}; {help}")]
    InvalidArgument {
        /// The argument.
        what: String,
        /// The value as it was given.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// A table of actions that is no schedule.
    #[error("the table of actions is no schedule: {reason}")]
    BadTable {
        /// What is missing or wrong.
        reason: String,
    },
    /// A candle operation failed.
    #[error("{operation}: {source}")]
    Tensor {
        /// What was being done.
        operation: String,
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },

    /// Communication failed.
    #[error(transparent)]
    Comm(#[from] comm::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
