//! The crate's one error type.

use std::path::PathBuf;
use std::sync::Arc;

use comm::{LineDifference, ParameterDifference};

/// What can go wrong in tensor parallelism.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes in the program or its input ----
    /// A size that the ranks do not divide.
    #[error(
        "{what}: {size} cannot be divided into {parts} equal parts for {ranks} tensor-parallel ranks; give a multiple of \
         {parts}, or another number of ranks"
    )]
    Indivisible {
        /// What it is the size of.
        what: String,
        /// The size.
        size: usize,
        /// Equal parts that are needed.
        parts: usize,
        /// Ranks of the group.
        ranks: usize,
    },
    /// A configuration or an argument that cannot be used.
    #[error("{what}: got {got}; {help}")]
    Invalid {
        /// What it is.
        what: String,
        /// What it was.
        got: String,
        /// What would be accepted.
        help: String,
    },
    /// Building the model failed on another rank.
    #[error("rank {rank} could not build its part of the model: {reason}")]
    PeerBuild {
        /// The first rank on which it did.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// The ranks have built different models.
    #[error(
        "the ranks do not build the same model: {0}; give every rank the same sizes, the same configuration and the same weights \
         (seed or file)"
    )]
    ModelMismatch(LineDifference),

    /// Backward was called on the loss itself.
    #[error(
        "backward came to layers of a TensorParallel outside of TensorParallel::backward, and the ranks' gradients would not be put \
         together: call `parallel.backward(&loss)` in place of `loss.backward()`, and `optimizer.step(&grads)` in place of \
         `optimizer.backward_step(&loss)`"
    )]
    OutsideBackward,
    /// A gradient holds a NaN or an infinity. Every rank gets this same error.
    #[error(
        "the gradient of parameter {parameter} on rank {rank} is not finite, all gradients together have a norm of {norm}; none was \
         changed: skip the step, or look for the cause"
    )]
    NotFinite {
        /// The first parameter of which it does, in order of construction.
        parameter: String,
        /// The first rank that has such a gradient, by its number in the whole job.
        rank: usize,
        /// The norm of all gradients together.
        norm: f64,
    },
    /// A parameter has other values on some of the ranks that have it, or the same part of it. Every rank gets this same error, and
    /// may go on.
    #[error(transparent)]
    ParametersDiffer(#[from] Box<ParameterDifference>),

    // ---- files ----
    /// A file that cannot be read or written.
    #[error("cannot {action} {}: {reason}", path.display())]
    File {
        /// `read`, `write` or `go on from`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        reason: String,
    },
    /// Not a safetensors file, or not all of one.
    #[error("{} is not a whole safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// A tensor that a file lacks.
    #[error("{} has no tensor `{name}` ({expected}); it holds {held}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its dtype and whole shape.
        expected: String,
        /// What the file has.
        held: String,
    },
    /// A tensor of a file that belongs to no layer.
    #[error("{} has a tensor `{name}` ({got}) that the model has not", path.display())]
    ExtraTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its dtype and shape.
        got: String,
    },
    /// A tensor of another dtype or shape.
    #[error("{}: tensor `{name}` is {got}, expected {expected}", path.display())]
    TensorMismatch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Dtype and whole shape that the model needs.
        expected: String,
        /// What the file has.
        got: String,
    },
    /// The rank that writes a file failed.
    #[error("rank {rank} {reason}")]
    PeerFile {
        /// That rank.
        rank: usize,
        /// What it said.
        reason: String,
    },

    // ---- what lies below ----
    /// A candle operation failed.
    #[error("{source}")]
    Tensor {
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },
    /// A piece of training failed: reading a checkpoint, say.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// Communication failed.
    #[error(transparent)]
    Comm(#[from] comm::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// True where the fault is another rank's: this process only noticed. See [`comm::Error::is_peer_failure`].
    ///
    /// ```
    /// let error = tensor_parallel::Error::PeerBuild { rank: 1, reason: "it has no memory".into() };
    /// assert!(error.is_peer_failure());
    /// ```
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Error::Comm(error) => error.is_peer_failure(),
            Error::PeerBuild { .. } | Error::PeerFile { .. } => true,
            _ => false,
        }
    }

    pub(crate) fn invalid(what: &str, got: impl std::fmt::Display, help: impl Into<String>) -> Self {
        Error::Invalid { what: what.into(), got: got.to_string(), help: help.into() }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            // Whoever knows nothing of this crate finds out that another rank failed.
            Error::Comm(error) => comm::carry(error),
            other => comm::carry(other),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(source: candle_core::Error) -> Self {
        find(&source).unwrap_or_else(|| Error::Tensor { source: Arc::new(source) })
    }
}

impl From<training::Error> for Error {
    fn from(error: training::Error) -> Self {
        Error::Training(Arc::new(error))
    }
}

impl From<Error> for comm::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Comm(error) => error,
            other => candle_core::Error::from(other).into(),
        }
    }
}

/// Our own error on its way back through candle, or `comm`'s.
fn find(error: &candle_core::Error) -> Option<Error> {
    let of_comm = || comm::carried(error).cloned().map(Error::Comm);
    comm::carried::<Error>(error).cloned().or_else(of_comm)
}
