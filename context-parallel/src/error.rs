//! Error type of this crate.

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors of dividing rows.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Rows that cannot be divided.
    #[error("rows of {len} places cannot be divided over {ranks} ranks in multiples of {multiple}: {help}")]
    Indivisible {
        /// Places of a row.
        len: usize,
        /// Number of ranks.
        ranks: usize,
        /// What each rank's number of places must be a multiple of.
        multiple: usize,
        /// What would be accepted.
        help: String,
    },
    /// An operation's error.
    #[error(transparent)]
    Ops(#[from] ops::Error),
}

impl From<Error> for comm::Error {
    fn from(error: Error) -> Self {
        comm::carry(error).into()
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        comm::carry(error)
    }
}
