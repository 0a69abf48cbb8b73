//! Forward passes in which every rank has whole rows.

use std::cell::RefCell;

use crate::scoped::scoped;

thread_local! {
    static WHOLE: RefCell<bool> = const { RefCell::new(false) };
}

/// Runs a forward pass in which every rank has whole rows between divided layers, also where those are divided along the sequence otherwise: for
/// rows of any length, one token for instance. On this thread; nothing may go backward from there.
///
/// ```
/// use training::build::{in_whole_rows, whole_rows};
///
/// assert!(whole_rows(in_whole_rows) && !in_whole_rows());
/// ```
pub fn whole_rows<T>(forward: impl FnOnce() -> T) -> T {
    scoped(&WHOLE, true, forward)
}

/// Whether this thread is in [`whole_rows`]: for layers that divide rows.
pub fn in_whole_rows() -> bool {
    WHOLE.with_borrow(|whole| *whole)
}
