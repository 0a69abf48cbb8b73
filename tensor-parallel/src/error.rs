//! The crate's error type.

use std::sync::Arc;

use comm::internal::LineDifference;

/// An error of tensor parallelism.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes in the program or its input ----
    /// A size that is not divisible by the number of ranks.
    #[error(
        "{what}: {size} cannot be divided into {parts} equal parts for {ranks} tensor-parallel ranks (tp={ranks} of a layout); give a \
         multiple of {parts}, or another number of ranks"
    )]
    Indivisible {
        /// What has this size.
        what: String,
        /// The size.
        size: usize,
        /// Required number of equal parts.
        parts: usize,
        /// Ranks in the group.
        ranks: usize,
    },
    /// A configuration or an argument that cannot be used.
    #[error("{what}: got {got}; {help}")]
    Invalid {
        /// What was configured or passed.
        what: String,
        /// Its value.
        got: String,
        /// Which values are accepted.
        help: String,
    },
    /// Building the model failed on another rank.
    #[error("rank {rank} could not build its part of the model: {reason}")]
    PeerBuild {
        /// The first rank that failed.
        rank: usize,
        /// Its error message.
        reason: String,
    },
    /// The ranks have built different models.
    #[error(
        "the ranks do not build the same model: {0}; give every rank the same sizes, the same configuration and the same weights \
         (seed or file)"
    )]
    ModelMismatch(LineDifference),

    /// Backward was called on the loss tensor instead of through `TensorParallel::backward`.
    #[error(
        "backward came to layers of a TensorParallel outside of TensorParallel::backward, and the ranks' gradients would not be put \
         together: call `parallel.backward(&loss)` in place of `loss.backward()`, and `optimizer.step(&grads)` in place of \
         `optimizer.backward_step(&loss)`"
    )]
    OutsideBackward,

    /// An earlier backward panicked.
    #[error(
        "an earlier backward of this TensorParallel panicked, and the ranks are no longer in step: end this process"
    )]
    Panicked,

    // ---- errors of other crates ----
    /// A candle operation failed.
    #[error("{source}")]
    Tensor {
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },
    /// An error of what the strategies share, such as checkpoints.
    #[error(transparent)]
    Strategy(strategy::Error),
    /// A failure in the `training` crate, e.g. in reading a file or a checkpoint.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// Communication failed.
    #[error(transparent)]
    Comm(#[from] comm::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns true if the failure is another rank's and this process only noticed it. See [`comm::Error::is_peer_failure`].
    ///
    /// ```
    /// let error = tensor_parallel::Error::PeerBuild { rank: 1, reason: "it has no memory".into() };
    /// assert!(error.is_peer_failure());
    /// ```
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Error::Comm(error) => error.is_peer_failure(),
            Error::Strategy(error) => error.is_peer_failure(),
            Error::PeerBuild { .. } => true,
            _ => false,
        }
    }

    pub(crate) fn invalid(what: &str, got: impl std::fmt::Display, help: impl Into<String>) -> Self {
        Error::Invalid { what: what.into(), got: got.to_string(), help: help.into() }
    }
}

strategy::error_conversions!(Error);

impl From<candle_core::Error> for Error {
    fn from(source: candle_core::Error) -> Self {
        comm::internal::carried_as(&source).unwrap_or_else(|| Error::Tensor { source: Arc::new(source) })
    }
}
