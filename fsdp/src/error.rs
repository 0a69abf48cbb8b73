//! The crate's error type.

use std::sync::Arc;

use candle_core::DType;
use comm::internal::LineDifference;

/// An error of sharded training. Errors are `Clone`: after a failure, a [`crate::Fsdp`] returns the first cause from every
/// later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes in the program ----
    /// A unit that requested no parameter.
    #[error(
        "unit {unit} has no parameters: make it a part of another unit, or leave it out of `UnitBuilder::unit`"
    )]
    EmptyUnit {
        /// The unit.
        unit: String,
    },
    /// Two units request the same parameter.
    #[error(
        "parameter {parameter} is in unit {first} and in unit {second}: a parameter is gathered and released with one unit; make \
         what shares it one unit"
    )]
    SharedParameter {
        /// The parameter.
        parameter: String,
        /// The unit that requested it first.
        first: String,
        /// The other unit.
        second: String,
    },
    /// Two units have the same name.
    #[error("two units are called {unit}: build each under a `pp` of its own")]
    SameUnit {
        /// The name.
        unit: String,
    },
    /// A unit is built inside another unit.
    #[error(
        "unit {inner} is made inside of unit {outer}, and a unit cannot hold another one: make {inner} before or after {outer}, or \
         a part of it"
    )]
    NestedUnit {
        /// The unit that is being built.
        outer: String,
        /// The unit whose construction was started meanwhile.
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
    /// A unit requests parameters of several dtypes.
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
    /// Strategy [`NoShard`](crate::ShardingStrategy::NoShard) for a model that is to be sharded along a mesh axis.
    #[error(
        "the strategy is NoShard, and the model is to be sharded along the axis {axis}: give FullShard or ShardGradOp, or use \
         `Fsdp::new`, with the group of all that train the model"
    )]
    NothingSharded {
        /// The axis.
        axis: String,
    },
    /// The model requested the same name twice, with different shapes.
    #[error(
        "the model asked for parameter {parameter} as {then}, and before as {first}; one name is one parameter"
    )]
    Ambiguous {
        /// The parameter.
        parameter: String,
        /// Shape in the first request.
        first: String,
        /// Shape in the later request.
        then: String,
    },
    /// A parameter was requested after its unit was built.
    #[error(
        "parameter {parameter} was asked for after unit {unit} was built: a unit must ask for all of them while it is built"
    )]
    RequestedAfterBuild {
        /// The parameter.
        parameter: String,
        /// The unit.
        unit: String,
    },
    /// A unit ran before its `Fsdp` was complete, or after it was dropped.
    #[error("unit {unit} runs while there is no Fsdp: it is still being built, or was dropped")]
    NotReady {
        /// The unit.
        unit: String,
    },
    /// A unit returned one of its parameters, or a view of one, which has no values after its run.
    #[error(
        "unit {unit} returned one of its parameters, which are released when it ends: return what is computed from it, such as \
         `weight.copy()`"
    )]
    ParameterReturned {
        /// The unit.
        unit: String,
    },
    /// Backward was called on the loss tensor instead of through `Fsdp::backward`.
    #[error(
        "backward reached unit {unit} outside of Fsdp::backward, and its gradients would come to no shard: call \
         `fsdp.backward(&loss)` in place of `loss.backward()`, and `optimizer.step(&grads)` in place of \
         `optimizer.backward_step(&loss)`"
    )]
    OutsideBackward {
        /// The first unit that backward reached.
        unit: String,
    },
    /// A device that shards cannot be on.
    #[error(
        "parameter {parameter} is on {device}; sharded parameters are on the CPU, or all on one CUDA device (feature `cuda`): give the builder such a device"
    )]
    UnsupportedDevice {
        /// The parameter.
        parameter: String,
        /// The device.
        device: String,
    },
    /// The ranks built different models, drew different initial values, or have different configurations. Every rank returns
    /// this same error.
    #[error(
        "the ranks do not train the same model: {0}; build the same model from the same values with the same FsdpConfig on every \
         rank{help}", help = help_with_values(&.0.odd)
    )]
    ModelMismatch(LineDifference),
    /// Another rank failed to build the model, or to read its shard.
    #[error("building the model failed on rank {rank}: {reason}")]
    PeerFailed {
        /// Its rank in the whole job.
        rank: usize,
        /// Its error message.
        reason: String,
    },
    /// The ranks ran their units in different orders. Every rank returns this same error, before any gradient is used.
    #[error(
        "rank {odd_rank} ran other units than rank {rank}, or in another order, in this step: gathered parameters may have been \
         mixed up; every rank must run the same units in the same order, forward and backward"
    )]
    OrderMismatch {
        /// A rank that differs from most.
        odd_rank: usize,
        /// A rank of the largest group that agrees, for comparison.
        rank: usize,
    },
    /// A candle operation failed.
    #[error("{operation}: {source}")]
    Tensor {
        /// The operation that failed.
        operation: &'static str,
        /// Candle's error.
        source: Arc<candle_core::Error>,
    },
    /// An error of what the strategies share, such as checkpoints.
    #[error(transparent)]
    Strategy(strategy::Error),
    /// A failure in the `training` crate, e.g. in reading a file.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// An earlier backward panicked.
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
    /// Returns true if the failure is another rank's and this process only noticed it. See [`comm::Error::is_peer_failure`].
    ///
    /// ```
    /// let died = comm::Error::PeerDied { rank: 1, host: "a".into(), operation: "barrier #3".into() };
    /// assert!(fsdp::Error::from(died).is_peer_failure());
    /// assert!(!fsdp::Error::Panicked.is_peer_failure());
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
    pub(crate) fn during(operation: &'static str) -> impl FnOnce(candle_core::Error) -> Self {
        move |source| match comm::internal::carried_as(&source) {
            Some(error) => error,
            None => Error::Tensor { operation, source: Arc::new(source) },
        }
    }
}

strategy::error_conversions!(Error);

impl From<candle_core::Error> for Error {
    fn from(source: candle_core::Error) -> Self {
        Error::during("tensor operation")(source)
    }
}

/// Returns advice for ranks that start from different values.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_survive_candle_and_comm() {
        let left = || comm::Error::PeerLeft { rank: 1, host: "a".into(), operation: "barrier #1".into() };
        let in_backward = training::Error::Candle(candle_core::Error::from(Error::Comm(left())).bt());
        assert!(matches!(Error::from(in_backward), Error::Comm(_)));
        let through = candle_core::Error::from(Error::Comm(left())).context("in the model").bt();
        assert!(matches!(comm::carried(&through), Some(comm::Error::PeerLeft { rank: 1, .. })));
        assert!(matches!(Error::from(through), Error::Comm(comm::Error::PeerLeft { rank: 1, .. })));
        assert!(matches!(Error::from(candle_core::Error::from(Error::Panicked).bt()), Error::Panicked));
        assert!(matches!(comm::Error::from(Error::Comm(left())), comm::Error::PeerLeft { rank: 1, .. }));
    }
}
