//! The crate's one error type.

use candle_core::DType;

/// What can go wrong in building or training a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of an optimizer's configuration cannot be used.
    #[error("{optimizer}: {field} is {got}; {help}")]
    InvalidConfig {
        /// The optimizer.
        optimizer: &'static str,
        /// The field of its configuration.
        field: &'static str,
        /// The value as it was given.
        got: f64,
        /// What would be accepted.
        help: &'static str,
    },
    /// A gradient does not fit its parameter.
    #[error(
        "{optimizer}: the gradient of parameter {index} is {got_dtype:?} of shape {got:?}, the parameter {dtype:?} of \
         shape {expected:?}"
    )]
    GradientMismatch {
        /// The optimizer.
        optimizer: &'static str,
        /// The parameter's place in the list that the optimizer was made with.
        index: usize,
        /// The parameter's shape.
        expected: Vec<usize>,
        /// The gradient's shape.
        got: Vec<usize>,
        /// The parameter's dtype.
        dtype: DType,
        /// The gradient's dtype.
        got_dtype: DType,
    },
    /// A variable of this name exists, but is of another shape or dtype than the model asks for.
    #[error(
        "variable `{name}` exists as {got_dtype:?} of shape {got:?}, the model asks for {dtype:?} of shape {expected:?}"
    )]
    VariableMismatch {
        /// The variable.
        name: String,
        /// The shape that the model asks for.
        expected: Vec<usize>,
        /// The shape that the variable has.
        got: Vec<usize>,
        /// The dtype that the model asks for.
        dtype: DType,
        /// The dtype that the variable has.
        got_dtype: DType,
    },
    /// Kaiming's rule divides by the number of inputs, which a tensor of fewer than two dimensions does not tell.
    #[error(
        "variable `{name}` of shape {shape:?} has no fan-in; Kaiming's rule needs two dimensions or more"
    )]
    NoFanIn {
        /// The variable.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A variable was asked for by name alone, and does not exist.
    #[error("variable `{name}` does not exist, and cannot be made without a shape; ask for it with one")]
    NoVariable {
        /// The variable.
        name: String,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        // Not `Error::wrap`, which adds a backtrace to the message where RUST_BACKTRACE is set.
        candle_core::Error::Wrapped(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candle_keeps_the_message() {
        let error = Error::NoVariable { name: "fc.weight".into() };
        let message = error.to_string();
        assert_eq!(candle_core::Error::from(error).to_string(), message);
    }
}
