//! The crate's one error type.

use std::path::{Path, PathBuf};

/// What can go wrong when a model is spread over ranks and trained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that cannot be.
    #[error("{what}: got {got}; {help}")]
    Invalid {
        /// The setting.
        what: String,
        /// What it is.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// No target of a batch counts, on any rank. Nothing has changed, and the next batch may follow.
    #[error("no target of the batch counts on any rank: at least one must")]
    NoTargets,
    /// A call after one that failed.
    #[error("an earlier step failed, and ranks are out of step: {first}")]
    Failed {
        /// What that failed with.
        first: String,
    },
    /// A gradient that holds a NaN or an infinity on some rank.
    #[error(
        "step {step}: the gradients' norm is {norm}, first seen in {parameter}: lower the learning rate, or look for a division by zero \
         or an overflow in the loss"
    )]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// A parameter with such a gradient.
        parameter: String,
        /// The norm of all gradients.
        norm: f64,
    },
    /// Another rank failed alone.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// Its number in the whole job.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// Ranks were lost, and those that are left are too few to go on.
    #[error("{left} of at least {fewest} ranks are left: {lost}")]
    TooFewRanks {
        /// How many are left.
        left: usize,
        /// How many there must be.
        fewest: usize,
        /// The last loss.
        lost: comm::Error,
    },
    /// A checkpoint or another file that cannot be used.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// What communication failed with.
    #[error(transparent)]
    Comm(#[from] comm::Error),
    /// What copies failed with.
    #[error(transparent)]
    Ddp(#[from] ddp::Error),
    /// What sharding failed with.
    #[error(transparent)]
    Fsdp(#[from] fsdp::Error),
    /// What divided layers failed with.
    #[error(transparent)]
    TensorParallel(#[from] tensor_parallel::Error),
    /// What stages failed with.
    #[error(transparent)]
    Pipeline(#[from] pipeline::Error),
    /// What models and their folders failed with.
    #[error(transparent)]
    Models(#[from] models::Error),
    /// What optimizers or files of tensors failed with.
    #[error(transparent)]
    Training(#[from] training::Error),
    /// What the model computed with failed with.
    #[error(transparent)]
    Candle(candle_core::Error),
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        // What communication inside the model failed with.
        match comm::carried::<comm::Error>(&error) {
            Some(carried) => Self::Comm(carried.clone()),
            None => Self::Candle(error),
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            // Whoever knows nothing of this crate finds out that another rank failed.
            Error::Comm(error) => error.into(),
            Error::Ddp(error) => error.into(),
            Error::Fsdp(error) => error.into(),
            Error::TensorParallel(error) => error.into(),
            other => comm::carry(other),
        }
    }
}

impl From<Error> for comm::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Comm(error) => error,
            Error::Ddp(error) => error.into(),
            Error::Fsdp(error) => error.into(),
            Error::TensorParallel(error) => error.into(),
            Error::Pipeline(error) => error.into(),
            other => comm::carry(other).into(),
        }
    }
}

/// What a fallible function gives.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn invalid(what: impl Into<String>, got: impl ToString, help: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), got: got.to_string(), help: help.into() }
    }

    pub(crate) fn file(path: &Path, problem: impl ToString) -> Self {
        Self::File { path: path.into(), problem: problem.to_string() }
    }

    /// The loss of a rank that the others can go on without, where it is that.
    pub fn loss(&self) -> Option<&comm::Error> {
        match self {
            Self::Comm(error) | Self::Ddp(ddp::Error::Comm(error)) => Some(error),
            _ => None,
        }
        .filter(|error| error.is_loss())
    }

    /// Whether another rank failed, and not this one.
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Self::PeerFailed { .. } => true,
            Self::Comm(error) => error.is_peer_failure(),
            Self::Ddp(error) => error.is_peer_failure(),
            Self::Fsdp(error) => error.is_peer_failure(),
            Self::TensorParallel(error) => error.is_peer_failure(),
            Self::Pipeline(error) => error.is_peer_failure(),
            _ => false,
        }
    }
}
