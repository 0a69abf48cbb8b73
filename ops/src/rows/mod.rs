//! What travels with the rows of a batch: keys of their random numbers, their documents and pairs, and how they are divided over ranks.

mod balance;
mod divided;
mod document_sums;
mod documents;
mod preferences;
mod random_keys;
mod routed;

use std::cell::RefCell;
use std::ops::Range;

pub(crate) use balance::Recorded;
pub use balance::{Balance, BalanceConfig, BalanceLoss, PendingSum, RankSum};
pub use divided::{DividedRows, PendingExchange, RowExchange};
pub use document_sums::{DocumentPlace, document_sums};
pub use documents::Documents;
pub use preferences::{Pair, PairResult, PreferenceConfig, PreferenceLoss, Preferences};
pub use random_keys::RowKeys;
pub(crate) use routed::Routed;

use crate::scoped::scoped;
use crate::{Error, Result};

thread_local! {
    static CURRENT: RefCell<RowContext> = const { RefCell::new(RowContext::NONE) };
}

/// What operations know of the rows of a batch beside the input. It travels with the rows: strategies divide it with them, and
/// recomputation in backward uses that of forward.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowContext {
    /// Random keys, in training. Default: none.
    pub keys: Option<RowKeys>,
    /// Where the documents of packed rows begin. Default: each row is one document.
    pub documents: Option<Documents>,
    /// Which places of the rows this rank has. The documents are those of the whole rows. Default: all.
    pub divided: Option<DividedRows>,
    /// How experts are balanced, in training. Default: they are not.
    pub balance: Option<Balance>,
    /// The pairs of answers that the documents are, and their loss. Default: none, the loss is a mean over targets.
    pub preferences: Option<Preferences>,
}

impl RowContext {
    const NONE: Self = Self { keys: None, documents: None, divided: None, balance: None, preferences: None };

    /// That of a range of the rows.
    ///
    /// # Panics
    /// If the range exceeds the rows.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        let keys = self.keys.as_ref().map(|keys| keys.part(rows.clone()));
        let documents = self.documents.as_ref().map(|documents| documents.part(rows.clone()));
        let preferences = self.preferences.as_ref().map(|preferences| preferences.part(rows));
        Self { keys, documents, preferences, divided: self.divided.clone(), balance: self.balance.clone() }
    }

    /// The positions of some of the places that this rank has of each of `rows` rows, row by row: within their documents, or
    /// within the row. `None` if they are the places themselves, in all rows.
    ///
    /// # Errors
    /// [`Error::UnfitDocuments`] and [`Error::UnfitDivision`]: documents of another number of rows, or more places than
    /// this rank has.
    ///
    /// ```
    /// use ops::{Documents, RowContext};
    ///
    /// let packed = RowContext { documents: Some(Documents::new([vec![2, 3]])?), ..RowContext::default() };
    /// assert_eq!(packed.positions("embedding", 1, 0..5)?, Some(vec![0, 1, 0, 1, 2]));
    /// assert_eq!(RowContext::default().positions("embedding", 1, 0..5)?, None);
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn positions(
        &self,
        operation: &'static str,
        rows: usize,
        places: Range<usize>,
    ) -> Result<Option<Vec<u32>>> {
        let places: Vec<u32> = match &self.divided {
            None => places.map(|place| place as u32).collect(),
            Some(divided) => match divided.places().get(places.clone()) {
                Some(places) => places.to_vec(),
                None => {
                    let own = divided.places().len();
                    let problem = format!("places up to {}: this rank has {own} of a row", places.end);
                    return Err(Error::UnfitDivision { operation, problem });
                }
            },
        };
        Ok(match &self.documents {
            None if self.divided.is_none() => None,
            None => Some(places.repeat(rows)),
            Some(documents) => Some(documents.positions_of(operation, rows, &places)?),
        })
    }

    /// The greatest number of positions of a row: of its longest document, of the whole row, or of `len` places.
    pub fn longest(&self, len: usize) -> usize {
        match (&self.documents, &self.divided) {
            (Some(documents), _) => documents.longest(),
            (None, Some(divided)) => divided.len(),
            (None, None) => len,
        }
    }

    /// Runs a forward pass of these rows, on this thread, in place of the context outside.
    pub fn scope<T>(&self, forward: impl FnOnce() -> T) -> T {
        scoped(&CURRENT, self.clone(), forward)
    }

    /// That of this thread's innermost scope, empty outside of one.
    pub fn current() -> Self {
        CURRENT.with_borrow(Clone::clone)
    }
}
