//! Building a model only to learn the sizes of its parameters.

use ops::kernels::scoped;
use std::cell::RefCell;

thread_local! {
    static IS_COUNTING: RefCell<bool> = const { RefCell::new(false) };
}

/// Builds a part of a model of which only the sizes of parameters are wanted, with a builder that gives all of them: those that only
/// other ranks have are asked for, too, and nothing is drawn. Applies to this thread.
///
/// ```
/// use training::build::{counting, is_counting};
///
/// assert!(counting(is_counting) && !is_counting());
/// ```
pub fn counting<T>(build: impl FnOnce() -> T) -> T {
    scoped(&IS_COUNTING, true, build)
}

/// Whether this thread is in [`counting`]: asked by layers that draw what only other ranks have.
pub fn is_counting() -> bool {
    IS_COUNTING.with_borrow(|counting| *counting)
}
