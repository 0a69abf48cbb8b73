//! The error type of this crate.

use std::path::{Path, PathBuf};

use crate::Layout;

/// An error from distributing or training a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that is not valid.
    #[error("{what}: got {got}; {help}")]
    Invalid {
        /// The setting.
        what: String,
        /// Its value.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// Ranks with different configurations.
    #[error(transparent)]
    Differ(Box<crate::settings::SettingDifference>),
    /// No target of a batch counts, on any rank. Nothing has changed, and training can continue with the next batch.
    #[error("no target of the batch counts on any rank: at least one must")]
    NoTargets,
    /// A call after an earlier failure.
    #[error("an earlier step failed, and ranks are out of step: {first}")]
    Failed {
        /// Message of that failure.
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
    /// Another rank failed, and not this one.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// Its global rank.
        rank: usize,
        /// Its error message.
        reason: String,
    },
    /// Ranks were lost, and too few are left to continue.
    #[error("{left} of at least {fewest} ranks are left: {lost}")]
    TooFewRanks {
        /// Number of remaining ranks.
        left: usize,
        /// Minimum number of ranks.
        fewest: usize,
        /// The last loss.
        lost: comm::Error,
    },
    /// Ranks were lost, and the layout of those that are left has no place for this one. Not a failure: the others go on.
    #[error("the others go on in the layout {layout}, and this rank is not needed any more")]
    NotNeeded {
        /// The layout of the others.
        layout: Layout,
    },
    /// The run was stopped early, as it was asked to ([`TrainConfig::stop`](crate::trainer::TrainConfig::stop)); if it keeps
    /// checkpoints, there is one of this step.
    #[error("the run was stopped after step {step}, as it was asked to")]
    Stopped {
        /// Completed steps.
        step: usize,
        /// The signal that asked for it, if it was one.
        signal: Option<i32>,
    },
    /// A rank was lost with a part of the model that no other rank has.
    #[error("{lost}; no other rank has its part of the model, and there is no checkpoint to go on from")]
    StateLost {
        /// The loss.
        lost: comm::Error,
    },
    /// A checkpoint or another file that cannot be used.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// An error of `comm`.
    #[error(transparent)]
    Comm(#[from] comm::Error),
    /// An error of `strategy`.
    #[error(transparent)]
    Strategy(strategy::Error),
    /// An error of `ddp`.
    #[error(transparent)]
    Ddp(#[from] ddp::Error),
    /// An error of `fsdp`.
    #[error(transparent)]
    Fsdp(#[from] fsdp::Error),
    /// An error of `tensor_parallel`.
    #[error(transparent)]
    TensorParallel(#[from] tensor_parallel::Error),
    /// Rows that cannot be divided over the ranks of `cp`.
    #[error(transparent)]
    ContextParallel(#[from] context_parallel::Error),
    /// An error of `pipeline`.
    #[error(transparent)]
    Pipeline(#[from] pipeline::Error),
    /// An error of `models`.
    #[error(transparent)]
    Models(models::Error),
    /// An error of `sampler`.
    #[error(transparent)]
    Sampler(#[from] sampler::SamplerError),
    /// An error of `training`: of an optimizer or a tensor file.
    #[error(transparent)]
    Training(training::Error),
    /// An error of candle, from computing the model.
    #[error(transparent)]
    Candle(candle_core::Error),
}

impl From<strategy::Error> for Error {
    fn from(error: strategy::Error) -> Self {
        match error {
            strategy::Error::Invalid { what, got, help } => Self::Invalid { what, got, help },
            strategy::Error::File { path, problem } => Self::File { path, problem },
            strategy::Error::PeerFailed { rank, reason } => Self::PeerFailed { rank, reason },
            strategy::Error::Comm(error) => Self::Comm(error),
            error => Self::Strategy(error),
        }
    }
}

impl From<training::Error> for Error {
    fn from(error: training::Error) -> Self {
        match error {
            training::Error::Candle(error) => error.into(),
            error => Self::Training(error),
        }
    }
}

impl From<ops::Error> for Error {
    fn from(error: ops::Error) -> Self {
        training::Error::from(error).into()
    }
}

impl From<training::FileError> for Error {
    fn from(error: training::FileError) -> Self {
        training::Error::from(error).into()
    }
}

impl From<models::Error> for Error {
    fn from(error: models::Error) -> Self {
        match error {
            models::Error::Candle(error) => error.into(),
            error => Self::Models(error),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        // An error of communication inside the model.
        match comm::carried::<comm::Error>(&error) {
            Some(carried) => Self::Comm(carried.clone()),
            None => Self::Candle(error),
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            // Kept as the errors of these crates, so that code that does not know this crate can detect a peer failure.
            Error::Comm(error) => error.into(),
            Error::Ddp(error) => error.into(),
            Error::Fsdp(error) => error.into(),
            Error::TensorParallel(error) => error.into(),
            Error::Pipeline(error) => error.into(),
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

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn invalid(what: impl Into<String>, got: impl ToString, help: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), got: got.to_string(), help: help.into() }
    }

    pub(crate) fn file(path: &Path, problem: impl ToString) -> Self {
        Self::File { path: path.into(), problem: problem.to_string() }
    }

    /// Returns the error if it is the loss of a rank without which the others can continue.
    pub fn loss(&self) -> Option<&comm::Error> {
        match self {
            Self::Comm(error)
            | Self::Ddp(ddp::Error::Comm(error))
            | Self::Fsdp(fsdp::Error::Comm(error))
            | Self::TensorParallel(tensor_parallel::Error::Comm(error))
            | Self::Pipeline(pipeline::Error::Comm(error)) => Some(error),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_rank_is_found_in_candles_errors() {
        let left = || comm::Error::PeerLeft { rank: 1, host: "a".into(), operation: "barrier #1".into() };
        for error in [
            Error::Comm(left()),
            Error::Ddp(left().into()),
            Error::Fsdp(left().into()),
            Error::TensorParallel(left().into()),
            Error::Pipeline(left().into()),
        ] {
            let shown = error.to_string();
            let through = candle_core::Error::from(error).context("in the model").bt();
            let back = Error::from(through);
            assert!(back.is_peer_failure() && back.loss().is_some(), "{shown}: {back}");
        }
    }
}
