//! Error type of this crate.

use std::path::PathBuf;

use candle_core::DType;

use crate::{FileError, GradientAudit, GradientCheck};

/// Errors of building or training a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of a configuration has an invalid value.
    #[error("{of}: {field} is {got}; {help}")]
    InvalidConfig {
        /// The configured type.
        of: &'static str,
        /// The invalid field.
        field: &'static str,
        /// The given value.
        got: f64,
        /// What would be accepted.
        help: &'static str,
    },
    /// A parameter that Muon is to step and that is no matrix.
    #[error("Muon: parameter {parameter} of shape {dims:?} is no matrix: leave it to AdamW")]
    NotAMatrix {
        /// The parameter.
        parameter: String,
        /// Its shape.
        dims: Vec<usize>,
    },
    /// A model of which no parameter is a matrix that Muon steps.
    #[error("Muon: no parameter is a matrix of a hidden layer: use AdamW, or leave fewer parameters to it")]
    NoMatrix,
    /// A file cannot be read or written.
    #[error(transparent)]
    File(Box<FileError>),
    /// A folder of checkpoints that another run uses.
    #[error("{}: another run keeps its checkpoints there{owner}: wait for it, end it, or give another folder", dir.display())]
    InUse {
        /// The folder.
        dir: PathBuf,
        /// Who began that run, and when; empty if that cannot be read.
        owner: String,
    },
    /// Parameters have no gradient on any rank.
    #[error(
        "{strategy}: after the first backward, all ranks together, {audit}; parameters that are frozen on purpose go into \
         `AuditConfig::frozen`"
    )]
    MissingGradients {
        /// The strategy that checked.
        strategy: &'static str,
        /// The parameters without a gradient.
        audit: GradientAudit,
    },
    /// Backward does not give the gradient of the loss.
    #[error("{check}; parameters whose gradient is stopped on purpose go into `GradientCheckConfig::frozen`")]
    LostGradients {
        /// What was found.
        check: GradientCheck,
    },
    /// A loss that is checked is another one each time.
    #[error(
        "gradients cannot be checked: two forward passes with the same parameters gave a loss of {first} and of {second}; random \
         numbers, such as dropout's, must be the same in each (`RowKeys`), or left out"
    )]
    NotRepeatable {
        /// The first loss.
        first: f64,
        /// The second loss.
        second: f64,
    },
    /// A gradient does not fit its parameter.
    #[error(
        "{optimizer}: the gradient of parameter {parameter} is {got_dtype:?} of shape {got:?}, the parameter {dtype:?} of \
         shape {expected:?}"
    )]
    GradientMismatch {
        /// The optimizer.
        optimizer: &'static str,
        /// The parameter's name, or its index in the list that the optimizer was made with.
        parameter: String,
        /// The parameter's shape.
        expected: Vec<usize>,
        /// The gradient's shape.
        got: Vec<usize>,
        /// The parameter's dtype.
        dtype: DType,
        /// The gradient's dtype.
        got_dtype: DType,
    },
    /// Two parameters of an optimizer have the same name, so their saved state would be ambiguous.
    #[error("{optimizer}: two parameters are named `{name}`")]
    DuplicateName {
        /// The optimizer.
        optimizer: &'static str,
        /// Their name.
        name: String,
    },
    /// A variable is given to an optimizer twice, which would step it twice.
    #[error(
        "{optimizer}: parameters `{first}` and `{second}` are the same variable, which would be stepped twice; give it once"
    )]
    DuplicateVariable {
        /// The optimizer.
        optimizer: &'static str,
        /// Its name, or its index in the list.
        first: String,
        /// Its other name, or index.
        second: String,
    },
    /// An optimizer's saved state has an entry that belongs to no parameter.
    #[error(
        "{optimizer}: the state `{key}` belongs to no parameter here; was it saved for another model or optimizer?"
    )]
    UnknownState {
        /// The optimizer.
        optimizer: &'static str,
        /// The entry.
        key: String,
    },
    /// An optimizer has state that belongs to no parameter; loading it would give it to the wrong ranks.
    #[error(
        "the optimizer's state `{key}` belongs to no parameter, so no rank could find its part again: make it from `{named_vars}`, so \
         that its parameters have the model's names"
    )]
    UnownedState {
        /// The optimizer's key for it.
        key: String,
        /// The method that returns the model's variables with their names.
        named_vars: &'static str,
    },
    /// An optimizer's saved state has some but not all entries of a parameter.
    #[error(
        "{optimizer}: the state has no `{key}`, but others of its parameter; was it saved by another optimizer?"
    )]
    MissingState {
        /// The optimizer.
        optimizer: &'static str,
        /// The missing entry.
        key: String,
    },
    /// An entry of an optimizer's saved state does not fit the parameter.
    #[error(
        "{optimizer}: the state `{key}` is {got_dtype:?} of shape {got:?}, its parameter needs {dtype:?} of shape \
         {expected:?}"
    )]
    StateMismatch {
        /// The optimizer.
        optimizer: &'static str,
        /// The entry.
        key: String,
        /// The expected shape.
        expected: Vec<usize>,
        /// The saved shape.
        got: Vec<usize>,
        /// The expected dtype.
        dtype: DType,
        /// The saved dtype.
        got_dtype: DType,
    },
    /// A gradient holds a NaN or an infinity.
    #[error(
        "the gradient of parameter {index} has a norm of {norm}; no gradient was changed: skip the step, or look for \
         the cause"
    )]
    NotFinite {
        /// Index of the first such parameter in the given list.
        index: usize,
        /// The norm of its gradient.
        norm: f64,
    },
    /// The norm of all gradients together is a NaN or an infinity.
    #[error(
        "all gradients together have a norm of {norm}; no gradient was changed: skip the step, or look for the cause"
    )]
    NormNotFinite {
        /// Their norm.
        norm: f64,
    },
    /// A variable of this name exists, but with another shape or dtype than the model requests.
    #[error(
        "variable `{name}` exists as {got_dtype:?} of shape {got:?}, the model asks for {dtype:?} of shape {expected:?}"
    )]
    VariableMismatch {
        /// The variable.
        name: String,
        /// The shape that the model requests.
        expected: Vec<usize>,
        /// The shape that the variable has.
        got: Vec<usize>,
        /// The dtype that the model requests.
        dtype: DType,
        /// The dtype that the variable has.
        got_dtype: DType,
    },
    /// Kaiming initialization needs the fan-in, which is undefined for a tensor of fewer than two dimensions.
    #[error(
        "variable `{name}` of shape {shape:?} has no fan-in; Kaiming's rule needs two dimensions or more"
    )]
    NoFanIn {
        /// The variable.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A variable was requested by name only, and does not exist.
    #[error("variable `{name}` does not exist, and cannot be made without a shape; ask for it with one")]
    NoVariable {
        /// The variable.
        name: String,
    },
    /// The name of a set of a checkpoint's tensors is not a valid file name stem.
    #[error("a checkpoint's tensors cannot be named `{name}`: use letters, digits, `-` and `_`")]
    InvalidName {
        /// The name.
        name: String,
    },
    /// A file system operation failed.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// The attempted operation.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file of a checkpoint has changed since it was written.
    #[error("`{}` cannot be trusted: {problem}; {good}", file.display())]
    DamagedCheckpoint {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// The newest earlier checkpoint that is intact.
        good: Fallback,
    },
    /// An error of an operation.
    #[error(transparent)]
    Operation(Box<ops::Error>),
    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The intact checkpoint to load instead of a damaged one, if there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback(pub Option<PathBuf>);

impl From<FileError> for Error {
    fn from(error: FileError) -> Self {
        Self::File(Box::new(error))
    }
}

impl From<Option<PathBuf>> for Fallback {
    fn from(folder: Option<PathBuf>) -> Self {
        Self(folder)
    }
}

impl std::fmt::Display for Fallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Some(folder) => write!(f, "`{}` is whole, and can be loaded in its place", folder.display()),
            None => write!(f, "no other checkpoint before it is whole"),
        }
    }
}

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl From<ops::Error> for Error {
    fn from(error: ops::Error) -> Self {
        Self::Operation(Box::new(error))
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Operation(error) => (*error).into(),
            // Not `Error::wrap`, which adds a backtrace to the message where RUST_BACKTRACE is set.
            other => candle_core::Error::Wrapped(Box::new(other)),
        }
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
