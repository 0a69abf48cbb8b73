//! What travels with the rows of a batch: keys of their random numbers, and their documents.

mod documents;
mod keys;

use std::cell::RefCell;
use std::ops::Range;

pub use documents::Documents;
pub use keys::RowKeys;

use crate::scoped::scoped;

thread_local! {
    static CURRENT: RefCell<RowContext> = const { RefCell::new(RowContext { keys: None, documents: None }) };
}

/// What operations know of the rows of a batch beside the input. It travels with the rows: strategies divide it with them, and
/// recomputation in backward uses that of forward.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowContext {
    /// Random keys, in training. Default: none.
    pub keys: Option<RowKeys>,
    /// Where the documents of packed rows begin. Default: each row is one document.
    pub documents: Option<Documents>,
}

impl RowContext {
    /// That of a range of the rows.
    ///
    /// # Panics
    /// If the range exceeds the rows.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        let keys = self.keys.as_ref().map(|keys| keys.part(rows.clone()));
        Self { keys, documents: self.documents.as_ref().map(|documents| documents.part(rows)) }
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
