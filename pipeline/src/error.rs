//! The crate's error type.

use std::sync::Arc;

/// An error of pipeline parallelism. Errors are `Clone`: after a failure, a [`crate::Pipeline`] returns the first cause from
/// every later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes in the program ----
    /// An argument that cannot be used.
    #[error("{what}: got {got}; {help}")]
    InvalidArgument {
        /// The argument.
        what: String,
        /// Its value.
        got: String,
        /// Which values are accepted.
        help: String,
    },
    /// A table of actions that is not a valid schedule.
    #[error("the table of actions is no schedule: {reason}")]
    BadTable {
        /// What is missing or wrong.
        reason: String,
    },
    /// More stages than modules.
    #[error(
        "{stages} stages cannot be made of {modules} modules: use fewer ranks or fewer stages a rank, or cut the model in \
         more modules"
    )]
    TooManyStages {
        /// Number of stages.
        stages: usize,
        /// Number of modules in the model.
        modules: usize,
    },
    /// A split at a module that does not exist.
    #[error("the model has no module {name} to be cut at; it has {modules}")]
    UnknownModule {
        /// The requested name.
        name: String,
        /// The names that exist.
        modules: String,
    },
    /// A variable that is in no stage.
    #[error("no stage has a variable {name}; this rank's stages have {known}")]
    UnknownVariable {
        /// The requested name.
        name: String,
        /// Names of this rank's variables.
        known: String,
    },
    /// A batch that cannot be divided into equal micro-batches.
    #[error(
        "the {what} has {rows} rows, which are no {micro_batches} micro-batches of {expected} rows each: give every step a \
         batch of {} rows", micro_batches * expected
    )]
    BatchSize {
        /// `input` or `target`.
        what: &'static str,
        /// Rows of the batch.
        rows: usize,
        /// Number of micro-batches.
        micro_batches: usize,
        /// Rows of each micro-batch.
        expected: usize,
    },
    /// A rank needs the input or the target of a step, and none was passed.
    #[error(
        "rank {rank} has the {place} stage and needs the {what} of each step: give it in `Pipeline::step`"
    )]
    NotGiven {
        /// The rank in the whole job.
        rank: usize,
        /// `first` or `last`.
        place: &'static str,
        /// `input` or `target`.
        what: &'static str,
    },
    /// A stage whose output, or gradient of its input, does not have the same shape for each micro-batch. The other ranks
    /// return [`Error::PeerFailed`] with this text.
    #[error(
        "stage {stage} gave {what} of {got} for micro-batch {micro_batch}, and {expected} when the pipeline was made: all \
         micro-batches must have one shape"
    )]
    ShapeChanged {
        /// The stage.
        stage: usize,
        /// An output, or a gradient of its input.
        what: &'static str,
        /// The micro-batch.
        micro_batch: usize,
        /// Dtype and shape when the pipeline was created.
        expected: String,
        /// Dtype and shape now.
        got: String,
    },
    /// A stage fails on an input of the shape that it would get. Every rank returns this same error.
    #[error("stage {stage} on rank {rank} fails on an input of {input}: {reason}")]
    DryRun {
        /// The stage.
        stage: usize,
        /// Its rank in the whole job.
        rank: usize,
        /// Dtype and shape of its input.
        input: String,
        /// Its error message.
        reason: String,
    },
    /// The ranks of [`crate::PipelineConfig::tp`] hold parts of some variables and the whole of others, and it
    /// has not been declared which.
    #[error(
        "{what} needs to know of which variables the tensor-parallel ranks have parts: call \
         `pipeline.set_divided(|name| shards.divided(name))` once, after the pipeline is made"
    )]
    DividedUnknown {
        /// The operation that needs to know.
        what: &'static str,
    },
    /// An error of what the strategies share, such as checkpoints.
    #[error(transparent)]
    Strategy(strategy::Error),
    /// A failure in the `training` crate: e.g. a checkpoint that cannot be written or is damaged.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// A candle operation failed.
    #[error("{operation}: {source}")]
    Tensor {
        /// The operation that failed.
        operation: String,
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },

    /// Another rank failed.
    #[error("rank {rank} could not go on: {reason}")]
    PeerFailed {
        /// The rank that failed first; rank in the whole job.
        rank: usize,
        /// Its error message.
        reason: String,
    },
    /// The ranks of a pipeline have different arguments. Every rank returns this same error.
    #[error(
        "the ranks do not agree on the pipeline: {what} is {got} on rank {rank} and {expected} on rank {first}; give all \
         the same"
    )]
    Disagreement {
        /// The argument.
        what: String,
        /// A rank that differs from most; rank in the whole job.
        rank: usize,
        /// Its value.
        got: String,
        /// A rank of the largest group that agrees, for comparison.
        first: usize,
        /// The value of that rank.
        expected: String,
    },
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
    /// let died = comm::Error::PeerDied { rank: 1, host: "a".into(), operation: "recv #3".into() };
    /// assert!(pipeline::Error::from(died).is_peer_failure());
    /// ```
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Error::Comm(error) => error.is_peer_failure(),
            Error::Strategy(error) => error.is_peer_failure(),
            Error::PeerFailed { .. } => true,
            _ => false,
        }
    }

    /// Wraps a candle error with the name of the operation, unless it carries an error of this crate or of `comm`.
    pub(crate) fn during(operation: impl Into<String>) -> impl FnOnce(candle_core::Error) -> Self {
        move |source| match comm::internal::carried_as(&source) {
            Some(error) => error,
            None => Error::Tensor { operation: operation.into(), source: Arc::new(source) },
        }
    }
}

strategy::error_conversions!(Error);
