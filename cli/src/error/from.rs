//! Conversions from other crates' errors that need more than `#[from]`.

use super::Error;

impl From<comm::Error> for Error {
    fn from(error: comm::Error) -> Self {
        Error::Comm(error)
    }
}

impl From<launch::Error> for Error {
    fn from(error: launch::Error) -> Self {
        match error {
            launch::Error::Comm(error) => Error::Comm(error),
            error => Error::Launch(error),
        }
    }
}

impl From<strategy::Error> for Error {
    fn from(error: strategy::Error) -> Self {
        match error {
            strategy::Error::Comm(error) => Error::Comm(error),
            error => Error::Strategy(error),
        }
    }
}

impl From<tensor_parallel::Error> for Error {
    fn from(error: tensor_parallel::Error) -> Self {
        match error {
            tensor_parallel::Error::Comm(error) => Error::Comm(error),
            error => Error::TensorParallel(error),
        }
    }
}

impl From<pipeline::Error> for Error {
    fn from(error: pipeline::Error) -> Self {
        match error {
            pipeline::Error::Comm(error) => Error::Comm(error),
            error => Error::Pipeline(error),
        }
    }
}

impl From<plan::Error> for Error {
    fn from(error: plan::Error) -> Self {
        match error {
            plan::Error::Pipeline(error) => error.into(),
            error => Error::Plan(error),
        }
    }
}

impl From<girandole::Error> for Error {
    fn from(error: girandole::Error) -> Self {
        match error {
            girandole::Error::TooFewRanks { left, fewest, lost } => {
                Error::TooFewRanks { left, min: fewest, lost }
            }
            girandole::Error::Differ(difference) => Error::Differ(difference),
            girandole::Error::Comm(error) => error.into(),
            girandole::Error::Strategy(error) => error.into(),
            girandole::Error::Ddp(error) => error.into(),
            girandole::Error::Fsdp(error) => error.into(),
            girandole::Error::TensorParallel(error) => error.into(),
            girandole::Error::Pipeline(error) => error.into(),
            girandole::Error::Training(error) => error.into(),
            girandole::Error::Models(error) => error.into(),
            girandole::Error::Candle(error) => error.into(),
            error => Error::Parallel(Box::new(error)),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        // Unwraps a communicator error that was carried through candle.
        match comm::Error::from(error) {
            comm::Error::Tensor { source, .. } => match std::sync::Arc::try_unwrap(source) {
                Ok(source) => Error::Tensor(source),
                Err(source) => Error::Tensor(candle_core::Error::Msg(source.to_string())),
            },
            error => Error::Comm(error),
        }
    }
}

impl From<ops::Error> for Error {
    fn from(error: ops::Error) -> Self {
        training::Error::from(error).into()
    }
}
