//! Why there is no plan.

/// What is wrong with what is to be planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// More parameters than can be counted.
    #[error("with the other sizes that makes {parameters:.1e} parameters: make the model smaller")]
    TooManyParameters {
        /// How many.
        parameters: f64,
    },
    /// More operations on a sample than can be counted.
    #[error(
        "with the other sizes one sample takes {operations:.1e} operations: make the model or its rows smaller"
    )]
    TooManyOperations {
        /// How many.
        operations: f64,
    },
    /// More samples in a step than can be counted.
    #[error("a sample has up to {numbers:.1e} numbers that go between ranks: give fewer")]
    TooManySamples {
        /// Numbers of one sample.
        numbers: f64,
    },
    /// A layout in which the model cannot be trained so.
    #[error("{reason}")]
    Layout {
        /// What does not go together.
        reason: String,
    },
    /// A pipeline that cannot be.
    #[error(transparent)]
    Pipeline(#[from] pipeline::Error),
    /// The plan as JSON.
    #[error("cannot write the plan as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn layout(reason: String) -> Self {
        Self::Layout { reason }
    }

    /// What a model was built with does not fit. The first line: candle may add a backtrace.
    pub(crate) fn model(error: candle_core::Error) -> Self {
        Self::layout(error.to_string().lines().next().unwrap_or_default().to_string())
    }
}
