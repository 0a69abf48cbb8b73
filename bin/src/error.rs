//! Everything that can end a command, in one line each.

use crate::file_error::FileError;
use crate::report::ReportError;
use crate::trace::TraceError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option has a value that cannot be used.
    #[error("{option}: got {got}; {help}")]
    Option {
        /// The option, as it is typed.
        option: &'static str,
        /// Its value.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// Something was asked for that this build or machine does not have.
    #[error("{wanted} is not available: {help}")]
    Unavailable {
        /// What was asked for.
        wanted: String,
        /// Why not, and what to do.
        help: String,
    },
    /// What a worker reported cannot be read.
    #[error("rank 0 ended without a result that can be read: {reason}")]
    NoResult {
        /// What is wrong with it.
        reason: String,
    },
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] std::io::Error),
    /// A file that an option names.
    #[error(transparent)]
    File(#[from] FileError),
    /// The report.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The sampler or loader.
    #[error(transparent)]
    Sampler(#[from] sampler::SamplerError),
    /// The other ranks, or starting them.
    #[error(transparent)]
    Comm(comm::Error),
    /// Data parallelism.
    #[error(transparent)]
    Ddp(#[from] ddp::Error),
    /// The missing pieces of training.
    #[error(transparent)]
    Training(#[from] training::Error),
    /// Tensor arithmetic.
    #[error(transparent)]
    Tensor(candle_core::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// What the process exits with: 2 for a wrong option, [`comm::launch::EXIT_PEER_FAILED`] where another rank is at
    /// fault, 128 and the signal's number where a signal ended it, 141 where nobody reads
    /// its output any more, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Option { .. } | Error::Unavailable { .. } => 2,
            Error::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => 141,
            Error::Comm(comm::Error::Interrupted { signal }) => (128 + signal).clamp(1, 255) as u8,
            Error::Comm(error) if error.is_peer_failure() => comm::launch::EXIT_PEER_FAILED as u8,
            Error::Ddp(error) if error.is_peer_failure() => comm::launch::EXIT_PEER_FAILED as u8,
            _ => 1,
        }
    }
}

impl From<comm::Error> for Error {
    fn from(error: comm::Error) -> Self {
        Error::Comm(error)
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        // An error of the communicator that came through candle is one of the communicator.
        match comm::Error::from(error) {
            comm::Error::Tensor { source, .. } => match std::sync::Arc::try_unwrap(source) {
                Ok(source) => Error::Tensor(source),
                Err(source) => Error::Tensor(candle_core::Error::Msg(source.to_string())),
            },
            error => Error::Comm(error),
        }
    }
}
