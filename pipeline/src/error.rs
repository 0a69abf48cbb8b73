//! The crate's one error type.

use std::sync::Arc;

use comm::ParameterDifference;

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
    /// More stages than there are modules to make them of.
    #[error(
        "{stages} stages cannot be made of {modules} modules: use fewer ranks or fewer stages a rank, or cut the model in \
         more modules"
    )]
    TooManyStages {
        /// Stages that were asked for.
        stages: usize,
        /// Modules of the model.
        modules: usize,
    },
    /// A cut at a module that does not exist.
    #[error("the model has no module {name} to be cut at; it has {modules}")]
    UnknownModule {
        /// The name as it was given.
        name: String,
        /// Those that there are.
        modules: String,
    },
    /// A variable that no stage has.
    #[error("no stage has a variable {name}; this rank's stages have {known}")]
    UnknownVariable {
        /// The name as it was given.
        name: String,
        /// Those that this rank has.
        known: String,
    },
    /// A batch that cannot be cut in equal micro-batches.
    #[error(
        "the {what} has {rows} rows, which are no {micro_batches} micro-batches of {expected} rows each: give every step a \
         batch of {} rows", micro_batches * expected
    )]
    BatchSize {
        /// Input or target.
        what: &'static str,
        /// Rows of the batch.
        rows: usize,
        /// Micro-batches that it is cut in.
        micro_batches: usize,
        /// Rows of each.
        expected: usize,
    },
    /// A rank that needs the input or the target of a step was not given it.
    #[error(
        "rank {rank} has the {place} stage and needs the {what} of each step: give it in `Pipeline::step`"
    )]
    NotGiven {
        /// The rank, by its number in the whole job.
        rank: usize,
        /// First or last.
        place: &'static str,
        /// Input or target.
        what: &'static str,
    },
    /// A stage that does not give the same shape for each micro-batch. The other ranks get [`Error::PeerFailed`] with this text.
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
        /// Dtype and shape found when the pipeline was made.
        expected: String,
        /// Dtype and shape now.
        got: String,
    },
    /// A stage cannot be run on an input of the shape that it would get. Every rank gets this same error.
    #[error("stage {stage} on rank {rank} fails on an input of {input}: {reason}")]
    DryRun {
        /// The stage.
        stage: usize,
        /// Its rank, by its number in the whole job.
        rank: usize,
        /// Dtype and shape of its input.
        input: String,
        /// What it fails with.
        reason: String,
    },
    /// The ranks of [`crate::PipelineConfig::tensor_parallel`] have parts of some variables and the whole of others, and nobody
    /// has said which.
    #[error(
        "{what} needs to know of which variables the tensor-parallel ranks have parts: call \
         `pipeline.set_divided(|name| shards.is_divided(name))` once, after the pipeline is made"
    )]
    DividedUnknown {
        /// What was to be done.
        what: &'static str,
    },
    /// A gradient holds a NaN or an infinity. Every rank gets this same error.
    #[error(
        "the gradient of {parameter} on rank {rank} is not finite, all gradients together have a norm of {norm}; none was \
         changed: skip the step, or look for the cause"
    )]
    NotFinite {
        /// The first variable of which it does.
        parameter: String,
        /// The first rank that has such a gradient, by its number in the whole job.
        rank: usize,
        /// The norm of all gradients together.
        norm: f64,
    },
    /// A variable has other values on some of the ranks that have it. Every rank gets this same error, and may go on.
    #[error(transparent)]
    ParametersDiffer(#[from] Box<ParameterDifference>),
    /// A checkpoint that is whole, but of something else.
    #[error("the checkpoint {} does not fit: {problem}", folder.display())]
    Checkpoint {
        /// The checkpoint.
        folder: std::path::PathBuf,
        /// What does not.
        problem: String,
    },
    /// A checkpoint that cannot be written or trusted.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// A candle operation failed.
    #[error("{operation}: {source}")]
    Tensor {
        /// What was being done.
        operation: String,
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },

    /// Another rank could not go on, for a reason of its own.
    #[error("rank {rank} could not go on: {reason}")]
    PeerFailed {
        /// The rank that failed first, by its number in the whole job.
        rank: usize,
        /// What it failed with.
        reason: String,
    },
    /// The ranks of a pipeline were given different arguments. Every rank gets this same error.
    #[error(
        "the ranks do not agree on the pipeline: {what} is {got} on rank {rank} and {expected} on rank {first}; give all \
         the same"
    )]
    Disagreement {
        /// The argument.
        what: String,
        /// A rank that differs from most, by its number in the whole job.
        rank: usize,
        /// Its value.
        got: String,
        /// A rank to compare it with.
        first: usize,
        /// That one's value.
        expected: String,
    },
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
    /// let died = comm::Error::PeerDied { rank: 1, host: "a".into(), operation: "recv #3".into() };
    /// assert!(pipeline::Error::from(died).is_peer_failure());
    /// ```
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Error::Comm(error) => error.is_peer_failure(),
            Error::PeerFailed { .. } => true,
            _ => false,
        }
    }

    /// Names what was being done.
    pub(crate) fn during(operation: impl Into<String>) -> impl FnOnce(candle_core::Error) -> Self {
        move |source| match comm::carried::<comm::Error>(&source) {
            // Of a layer that communicates.
            Some(error) => Error::Comm(error.clone()),
            None => Error::Tensor { operation: operation.into(), source: Arc::new(source) },
        }
    }
}

impl From<Error> for comm::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Comm(error) => error,
            other => comm::carry(other).into(),
        }
    }
}
