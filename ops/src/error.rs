//! Error type of this crate.

use candle_core::DType;

/// Errors of operations.
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
    /// A router has scores that are not numbers.
    #[error(
        "{router}: the scores of experts are not finite numbers; a parameter or an input before it is not finite: look for it with a \
         lower learning rate, or in the weights that were read"
    )]
    ScoresNotFinite {
        /// The router.
        router: String,
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
    /// Rows that are divided over ranks do not fit an operation.
    #[error("{operation} of rows that are divided over ranks: {problem}")]
    UnfitDivision {
        /// The operation.
        operation: &'static str,
        /// What does not fit, and what would.
        problem: String,
    },
    /// Candle's own backward reached a part that is recomputed.
    #[error(
        "backward came to a part of the model that is computed again (ops::recompute) and has {variables} variables, whose \
         gradients `loss.backward()` cannot give: call `ops::backward(&loss)` in its place, and `optimizer.step(&grads)` in place \
         of `optimizer.backward_step(&loss)`"
    )]
    OutsideBackward {
        /// Number of variables in that part.
        variables: usize,
    },
    /// A recomputed part behaved differently the second time.
    #[error(
        "a part of the model that is computed again in backward (ops::recompute) did not repeat itself: {what} {first}, and then \
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
    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
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
