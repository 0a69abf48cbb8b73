//! The crate's error type.

/// Why no plan can be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model has too many parameters to be counted.
    #[error("with the other sizes that makes {parameters:.1e} parameters: make the model smaller")]
    TooManyParameters {
        /// Number of parameters.
        parameters: f64,
    },
    /// A sample takes too many operations to be counted.
    #[error(
        "with the other sizes one sample takes {operations:.1e} operations: make the model or its rows smaller"
    )]
    TooManyOperations {
        /// Number of operations.
        operations: f64,
    },
    /// A step has too many samples to be counted.
    #[error("a sample has up to {numbers:.1e} numbers that go between ranks: give fewer")]
    TooManySamples {
        /// Number of elements sent between ranks for one sample.
        numbers: f64,
    },
    /// A layout in which the model cannot be trained.
    #[error("{reason}")]
    Layout {
        /// What is incompatible.
        reason: String,
    },
    /// A pipeline schedule that is not possible.
    #[error(transparent)]
    Pipeline(#[from] pipeline::Error),
    /// The plan cannot be written as JSON.
    #[error("cannot write the plan as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn layout(reason: String) -> Self {
        Self::Layout { reason }
    }

    /// The model cannot be built with these sizes. Only the first line: candle may add a backtrace.
    pub(crate) fn model(error: candle_core::Error) -> Self {
        Self::layout(error.to_string().lines().next().unwrap_or_default().to_string())
    }
}
