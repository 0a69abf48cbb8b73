//! Forward passes without sequence parallelism.

use ops::kernels::scoped;
use std::cell::RefCell;

thread_local! {
    static IN_WHOLE_ROWS: RefCell<bool> = const { RefCell::new(false) };
}

/// Runs a forward pass in which every rank has whole sequences between divided layers, even where sequence
/// parallelism would divide them: for sequences of any length, such as one token. Applies to this thread; there must
/// be no backward through the result.
///
/// ```
/// use training::build::{in_whole_rows, whole_rows};
///
/// assert!(whole_rows(in_whole_rows) && !in_whole_rows());
/// ```
pub fn whole_rows<T>(forward: impl FnOnce() -> T) -> T {
    scoped(&IN_WHOLE_ROWS, true, forward)
}

/// Whether this thread is in [`whole_rows`]: asked by layers that divide sequences.
pub fn in_whole_rows() -> bool {
    IN_WHOLE_ROWS.with_borrow(|whole| *whole)
}
