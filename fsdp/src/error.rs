//! The crate's one error type.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use comm::LineDifference;

/// What can go wrong in sharded training. Errors are `Clone`: a [`crate::Fsdp`] that failed answers every later call with the
/// first cause.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes in the program ----
    /// A unit that asked for no parameter.
    #[error(
        "unit {unit} has no parameters: make it a part of another unit, or leave it out of `UnitBuilder::unit`"
    )]
    EmptyUnit {
        /// The unit.
        unit: String,
    },
    /// Two units ask for one parameter.
    #[error(
        "parameter {parameter} is in unit {first} and in unit {second}: a parameter is gathered and released with one unit; make \
         what shares it one unit"
    )]
    SharedParameter {
        /// The parameter.
        parameter: String,
        /// The unit that asked for it first.
        first: String,
        /// The other one.
        second: String,
    },
    /// Two units of one name.
    #[error("two units are called {unit}: build each under a `pp` of its own")]
    SameUnit {
        /// The name.
        unit: String,
    },
    /// A unit inside of another one.
    #[error(
        "unit {inner} is made inside of unit {outer}, and a unit cannot hold another one: make {inner} before or after {outer}, or \
         a part of it"
    )]
    NestedUnit {
        /// The unit that is being built.
        outer: String,
        /// The one that was to be made meanwhile.
        inner: String,
    },
    /// A parameter that cannot be trained.
    #[error(
        "parameter {parameter} of unit {unit} is of dtype {dtype:?}; f64, f32, f16 and bf16 can be sharded: name it in \
         `FsdpConfig::buffers` if it is state and not trained"
    )]
    UnsupportedDtype {
        /// The parameter.
        parameter: String,
        /// Its unit.
        unit: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A unit asks for parameters of several dtypes.
    #[error(
        "parameter {parameter} of unit {unit} is asked for as {got:?}, and the unit's others as {expected:?}: a unit's \
         parameters are one buffer, of the builder's dtype"
    )]
    MixedDtypes {
        /// The parameter.
        parameter: String,
        /// Its unit.
        unit: String,
        /// Its dtype.
        got: DType,
        /// The unit's dtype.
        expected: DType,
    },
    /// A dtype of [`crate::MixedPrecision`] or [`crate::FsdpConfig`] that cannot be computed with.
    #[error("{field} is {dtype:?}; give f64, f32, f16 or bf16")]
    InvalidDtype {
        /// The field.
        field: &'static str,
        /// Its value.
        dtype: DType,
    },
    /// A model that is to be sharded along an axis of a mesh, and whose strategy is to shard nothing.
    #[error(
        "the strategy is NoShard, and the model is to be sharded along the axis {axis}: give FullShard or ShardGradOp, or use \
         `Fsdp::new`, with the group of all that train the model"
    )]
    NothingSharded {
        /// The axis.
        axis: String,
    },
    /// The model asked for one name twice, and not for the same thing.
    #[error(
        "the model asked for parameter {parameter} as {then}, and before as {first}; one name is one parameter"
    )]
    Ambiguous {
        /// The parameter.
        parameter: String,
        /// Shape at first.
        first: String,
        /// Shape later.
        then: String,
    },
    /// A parameter was asked for after its unit was built.
    #[error(
        "parameter {parameter} was asked for after unit {unit} was built: a unit must ask for all of them while it is built"
    )]
    TooLate {
        /// The parameter.
        parameter: String,
        /// The unit.
        unit: String,
    },
    /// A unit ran without the wrapper that it was built in.
    #[error("unit {unit} runs while there is no Fsdp: it is still being built, or was dropped")]
    NotReady {
        /// The unit.
        unit: String,
    },
    /// Backward was called on the loss itself.
    #[error(
        "backward reached unit {unit} outside of Fsdp::backward, and its gradients would come to no shard: call \
         `fsdp.backward(&loss)` in place of `loss.backward()`, and `optimizer.step(&grads)` in place of \
         `optimizer.backward_step(&loss)`"
    )]
    OutsideBackward {
        /// The first unit that was reached.
        unit: String,
    },
    /// A device that shards cannot be on.
    #[error(
        "parameter {parameter} is on {device}; sharded parameters are on the CPU, or all on one CUDA device (feature `cuda`): give the builder such a device"
    )]
    UnsupportedDevice {
        /// The parameter.
        parameter: String,
        /// Where it is.
        device: String,
    },
    /// The ranks built different models, drew different values, or were configured differently. Every rank gets this same error.
    #[error(
        "the ranks do not train the same model: {0}; build the same model from the same values with the same FsdpConfig on every \
         rank{help}", help = help_with_values(&.0.odd)
    )]
    ModelMismatch(LineDifference),
    /// Another rank could not build the model, or read its part of it.
    #[error("building the model failed on rank {rank}: {reason}")]
    PeerFailed {
        /// The rank, by its number in the whole job.
        rank: usize,
        /// What it says.
        reason: String,
    },
    /// The ranks ran their units in different orders. Every rank gets this same error, before any gradient is used.
    #[error(
        "rank {odd_rank} ran other units than rank {rank}, or in another order, in this step: gathered parameters may have been \
         mixed up; every rank must run the same units in the same order, forward and backward"
    )]
    OrderMismatch {
        /// A rank that differs from most.
        odd_rank: usize,
        /// A rank to compare it with.
        rank: usize,
    },
    /// Copies of a shard have other values. Every rank gets this same error, and may go on.
    #[error(transparent)]
    ParametersDiffer(#[from] Box<comm::ParameterDifference>),
    /// An optimizer remembers something of no parameter, which would be given to the wrong ranks when it is loaded.
    #[error(
        "the optimizer's state `{key}` belongs to no parameter, so no rank could find its part again: make it from \
         `Fsdp::named_vars`, as in `Adam::named(fsdp.named_vars(), config)`"
    )]
    StrayState {
        /// The optimizer's name for it.
        key: String,
    },
    /// A file that cannot be used.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A file that another rank cannot use.
    #[error("{}: on rank {rank}: {problem}", path.display())]
    PeerFile {
        /// The file, or the checkpoint that it is of.
        path: PathBuf,
        /// The rank, by its number in the whole job.
        rank: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A candle operation failed.
    #[error("{operation}: {source}")]
    Tensor {
        /// What was being done.
        operation: &'static str,
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },
    /// A piece of training failed: clipping, say.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// A gradient holds a NaN or an infinity. Every rank gets this same error.
    #[error(
        "the gradient of {unit} is not finite on some rank, all gradients together have a norm of {norm}; none was changed: skip \
         the step, or look for the cause"
    )]
    NotFinite {
        /// The first unit of which it does, in order of construction.
        unit: String,
        /// The norm of all gradients together.
        norm: f64,
    },
    /// A panic ended an earlier backward half-way.
    #[error(
        "an earlier backward of this Fsdp panicked, and the ranks are no longer in step: end this process"
    )]
    Panicked,

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
    /// let died = comm::Error::PeerDied { rank: 1, host: "a".into(), operation: "barrier #3".into() };
    /// assert!(fsdp::Error::from(died).is_peer_failure());
    /// assert!(!fsdp::Error::Panicked.is_peer_failure());
    /// ```
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Error::Comm(error) => error.is_peer_failure(),
            Error::PeerFile { .. } | Error::PeerFailed { .. } => true,
            _ => false,
        }
    }

    pub(crate) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Error::File { path: path.to_path_buf(), problem: problem.into() }
    }

    /// Names what was being done, unless the error is ours or `comm`'s on its way through candle.
    pub(crate) fn during(operation: &'static str) -> impl FnOnce(candle_core::Error) -> Self {
        move |source| match find(&source) {
            Some(error) => error,
            None => Error::Tensor { operation, source: Arc::new(source) },
        }
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
        Error::during("tensor operation")(source)
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

/// What to do where ranks begin with different values.
fn help_with_values(odd: &str) -> &'static str {
    if odd.contains("with values of hash") {
        ": the builder of a `VarMap` draws other values on every rank, `training::TorchInit::tensor_builder` with the same seed \
         the same ones"
    } else if odd.contains("values of hash") {
        ": all must read the same files"
    } else {
        ""
    }
}

/// Our own error on its way back through candle, or `comm`'s.
fn find(error: &candle_core::Error) -> Option<Error> {
    let of_comm = || comm::carried(error).cloned().map(Error::Comm);
    comm::carried::<Error>(error).cloned().or_else(of_comm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_survive_candle_and_comm() {
        let left = || comm::Error::PeerLeft { rank: 1, host: "a".into(), operation: "barrier #1".into() };
        let through = candle_core::Error::from(Error::Comm(left())).context("in the model").bt();
        assert!(matches!(comm::carried(&through), Some(comm::Error::PeerLeft { rank: 1, .. })));
        assert!(matches!(Error::from(through), Error::Comm(comm::Error::PeerLeft { rank: 1, .. })));
        assert!(matches!(Error::from(candle_core::Error::from(Error::Panicked).bt()), Error::Panicked));
        assert!(matches!(comm::Error::from(Error::Comm(left())), comm::Error::PeerLeft { rank: 1, .. }));
    }
}
