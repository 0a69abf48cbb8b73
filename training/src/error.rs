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
    /// A tensor does not have the shape that an operation needs.
    #[error("{operation}: {tensor} must be of shape {expected:?}, got {got:?}")]
    ShapeMismatch {
        /// The operation.
        operation: &'static str,
        /// Which of its tensors.
        tensor: &'static str,
        /// The expected shape.
        expected: Vec<usize>,
        /// The actual shape.
        got: Vec<usize>,
    },
    /// Two tensors that an operation takes together differ in dtype.
    #[error("{operation}: {tensor} is {got:?}, the input {expected:?}; convert one of them with to_dtype")]
    DTypeMismatch {
        /// The operation.
        operation: &'static str,
        /// Which of its tensors.
        tensor: &'static str,
        /// The input's dtype.
        expected: DType,
        /// The tensor's dtype.
        got: DType,
    },
    /// A look-up with ids of a dtype that is not integer.
    #[error("{operation} takes ids of u8, u32 or i64, got {got:?}")]
    NotIds {
        /// The operation.
        operation: &'static str,
        /// The given dtype.
        got: DType,
    },
    /// A look-up of a row that a table does not have.
    #[error("{operation}: no row (token) {id}: the table has {rows}, from 0 on")]
    NoSuchRow {
        /// The operation.
        operation: &'static str,
        /// The id that was looked up.
        id: i64,
        /// Number of rows in the table.
        rows: usize,
    },
    /// An operation on real numbers was given another dtype.
    #[error("{operation} takes f16, bf16, f32 or f64, got {got:?}")]
    UnsupportedDtype {
        /// The operation.
        operation: &'static str,
        /// The given dtype.
        got: DType,
    },
    /// Target classes of a dtype that is not integer.
    #[error("{operation} takes targets of u8, u32 or i64, got {got:?}")]
    TargetsNotInteger {
        /// The operation.
        operation: &'static str,
        /// The given dtype.
        got: DType,
    },
    /// A target is not one of the classes.
    #[error(
        "the target of row {row} is {target}, which is none of the {classes} classes; rows to be left out are marked with \
         ignore_index, which is {ignore_index:?}"
    )]
    TargetOutOfRange {
        /// The row's index, counted over all dimensions but the last.
        row: usize,
        /// Its target.
        target: i64,
        /// Number of classes in the logits.
        classes: usize,
        /// The target that marks ignored rows.
        ignore_index: Option<i64>,
    },
    /// Positions beyond the end of a table.
    #[error(
        "{operation}: {positions} positions from {offset} on are beyond the table of {max_len}; make it with a larger max_len"
    )]
    BeyondTable {
        /// The operation.
        operation: &'static str,
        /// The first position.
        offset: usize,
        /// Number of positions.
        positions: usize,
        /// Number of positions in the table.
        max_len: usize,
    },
    /// The documents of packed rows do not fit an operation.
    #[error("{operation} within Documents: {problem}")]
    UnfitDocuments {
        /// The operation.
        operation: &'static str,
        /// What does not fit, and what would.
        problem: String,
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
    /// Candle's own backward reached a part that is recomputed.
    #[error(
        "backward came to a part of the model that is computed again (training::recompute) and has {variables} variables, whose \
         gradients `loss.backward()` cannot give: call `training::backward(&loss)` in its place, and `optimizer.step(&grads)` in place \
         of `optimizer.backward_step(&loss)`"
    )]
    OutsideBackward {
        /// Number of variables in that part.
        variables: usize,
    },
    /// A recomputed part behaved differently the second time.
    #[error(
        "a part of the model that is computed again in backward (training::recompute) did not repeat itself: {what} {first}, and then \
         {again}; it may depend on its input and on parameters alone"
    )]
    NotRepeated {
        /// What differs.
        what: &'static str,
        /// Its value in forward.
        first: String,
        /// Its value in backward.
        again: String,
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

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
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
