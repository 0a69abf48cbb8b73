//! How documents are put into rows.

mod fit;
mod whole;

use std::fmt;
use std::str::FromStr;

pub(super) use fit::Part;
pub(super) use whole::Whole;

/// How the documents of a file are put into rows.
///
/// ```
/// use models::tokens::Packing;
///
/// assert_eq!("whole".parse(), Ok(Packing::Whole));
/// assert_eq!(Packing::Documents.to_string(), "documents");
/// assert!("some".parse::<Packing>().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Documents follow each other and are cut at the row's length; each token sees all before it in the row.
    Stream,
    /// The same rows, but each token only sees those before it in its document.
    Documents,
    /// No document that fits a row is cut: rows are filled by best fit, and each token only sees those before it in its
    /// document.
    Whole,
}

impl FromStr for Packing {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Stream, Self::Documents, Self::Whole];
        all.into_iter().find(|packing| packing.to_string() == text).ok_or("give stream, documents or whole")
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stream => "stream",
            Self::Documents => "documents",
            Self::Whole => "whole",
        })
    }
}

/// What is done with a document that is longer than a row, under [`Packing::Whole`].
///
/// ```
/// use models::tokens::TooLong;
///
/// assert_eq!(("drop".parse(), TooLong::default()), (Ok(TooLong::Drop), TooLong::Cut));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TooLong {
    /// It is cut into pieces of a row's length, and a last one: nothing is lost, but no piece sees another.
    #[default]
    Cut,
    /// Its first tokens fill a row, and the rest is left out, as in transformers: documents with labels are not cut into pieces,
    /// which would have none.
    Truncate,
    /// It is left out.
    Drop,
    /// It is an error.
    Error,
}

impl FromStr for TooLong {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Cut, Self::Truncate, Self::Drop, Self::Error];
        let found = all.into_iter().find(|too_long| too_long.to_string() == text);
        found.ok_or("give cut, truncate, drop or error")
    }
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cut => "cut",
            Self::Truncate => "truncate",
            Self::Drop => "drop",
            Self::Error => "error",
        })
    }
}

/// What became of the documents that are packed whole.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PackingReport {
    /// Number of documents.
    pub documents: u64,
    /// Number of those that were longer than a row, and were cut or truncated.
    pub cut: u64,
    /// Number of those that were longer than a row, and were left out.
    pub dropped: u64,
    /// Share of the places of an epoch's rows that are unused, from 0 to 1.
    pub padding: f64,
}
