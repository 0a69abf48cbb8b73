//! The crate's error type.

use std::sync::Arc;

use candle_core::DType;
use comm::internal::LineDifference;

/// An error of data-parallel training. Errors are `Clone`: after a failure, a [`crate::Ddp`] returns the first cause from
/// every later call.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- mistakes in the program ----
    /// Backward was called on the loss tensor instead of through `Ddp::backward`; each rank would have kept its own
    /// gradients.
    #[error(
        "backward reached parameter {parameter} outside of Ddp::backward, and its gradient would not be averaged: call \
         `ddp.backward(&loss)` in place of `loss.backward()`, and `optimizer.step(&grads)` in place of \
         `optimizer.backward_step(&loss)`"
    )]
    OutsideBackward {
        /// The first parameter that backward reached.
        parameter: String,
    },
    /// The loss depends directly on a parameter's variable, so that part of its gradient is in no bucket.
    #[error(
        "the loss uses the variable of parameter {parameter} itself, not only through the model, and that part of its \
         gradient cannot be averaged: compute with `Parameter::tensor` of `Ddp::parameters`"
    )]
    DirectUse {
        /// The parameter.
        parameter: String,
    },
    /// A gradient arrived after its bucket had been averaged, which only the first backward can handle.
    #[error(
        "parameter {parameter} got one more gradient in this backward than in any before, after the others had been averaged: it is \
         used in something that backward computes again; let the first backward of all use it as often as any, or let all \
         parameters be in one bucket, which is averaged after backward, by a `DdpConfig::bucket_bytes` and \
         `DdpConfig::first_bucket_bytes` of `usize::MAX`"
    )]
    LateGradient {
        /// The parameter.
        parameter: String,
    },
    /// A parameter of a dtype that cannot be averaged.
    #[error(
        "parameter {parameter} is of dtype {dtype:?}; gradients of f64, f32, f16 and bf16 can be averaged"
    )]
    UnsupportedDtype {
        /// The parameter.
        parameter: String,
        /// Its dtype.
        dtype: DType,
    },
    /// The model requested the same name twice, with different shapes or dtypes.
    #[error(
        "the model asked for parameter {parameter} as {then}, and before as {first}; one name is one parameter"
    )]
    Ambiguous {
        /// The parameter.
        parameter: String,
        /// Shape or dtype in the first request.
        first: String,
        /// Shape or dtype in the later request.
        then: String,
    },
    /// The model requested a parameter after it was built.
    #[error(
        "parameter {parameter} was asked for after Ddp::new: a model must ask for all of them while it is built"
    )]
    RequestedAfterBuild {
        /// The parameter.
        parameter: String,
    },
    /// The ranks built different models, or have different configurations. Every rank returns this same error. The place is
    /// the index of the first parameter that differs, in order of construction, counted from 1; 0 is the configuration.
    #[error(
        "the ranks do not train the same model: at place {place}, {0}; build the same model with the same DdpConfig on every rank",
        place = .0.place
    )]
    ModelMismatch(LineDifference),
    /// A weight that is negative or not finite.
    #[error(
        "backward_weighted: got weight {weight}; it is the number of samples or tokens over which the loss is a mean: a \
         finite number, 0 or more"
    )]
    InvalidWeight {
        /// The weight.
        weight: f64,
    },
    /// Weighted and unweighted losses in the same step of this rank.
    #[error(
        "this step has losses with a weight and losses without, which have no common average: use \
         `backward_weighted_no_sync` together with `backward_weighted` or `join`, and `backward_no_sync` with `backward`"
    )]
    MixedAverages,
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
    /// A failure in the `training` crate, e.g. in clipping.
    #[error(transparent)]
    Training(Arc<training::Error>),
    /// An earlier backward panicked.
    #[error(
        "an earlier backward of this Ddp panicked, and the ranks are no longer in step: end this process"
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
    /// assert!(ddp::Error::from(died).is_peer_failure());
    /// assert!(!ddp::Error::Panicked.is_peer_failure());
    /// ```
    pub fn is_peer_failure(&self) -> bool {
        match self {
            Error::Comm(error) => error.is_peer_failure(),
            Error::Strategy(error) => error.is_peer_failure(),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn left() -> comm::Error {
        comm::Error::PeerLeft { rank: 1, host: "a".into(), operation: "barrier #1".into() }
    }

    #[test]
    fn errors_survive_candle() {
        for error in [Error::Comm(left()).into(), candle_core::Error::from(left())] {
            let through: candle_core::Error = error;
            let back = Error::from(through.context("in the model").bt());
            assert!(matches!(&back, Error::Comm(comm::Error::PeerLeft { rank: 1, .. })), "{back}");
            assert!(back.is_peer_failure());
        }
        let through = candle_core::Error::from(Error::Comm(left())).bt();
        assert!(matches!(comm::carried(&through), Some(comm::Error::PeerLeft { rank: 1, .. })));
        let ours = candle_core::Error::from(Error::Panicked).bt();
        assert!(matches!(Error::from(ours), Error::Panicked));
    }

    #[test]
    fn errors_go_into_those_of_comm() {
        assert!(matches!(comm::Error::from(Error::Comm(left())), comm::Error::PeerLeft { rank: 1, .. }));
        assert!(comm::Error::from(Error::Panicked).to_string().contains("panicked"));
    }
}
