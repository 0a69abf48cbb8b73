//! The graph node of the part that backward is recomputing on this thread.

use std::cell::Cell;

use candle_core::TensorId;

thread_local! {
    static OUTERMOST: Cell<Option<TensorId>> = const { Cell::new(None) };
}

/// Id of the result of the part that this thread is recomputing, in the graph that backward runs on; for nested
/// parts, that of the outermost. `None` outside of [`recompute`](crate::recompute)'s backward. For code that gathers
/// and releases parameters.
/// ```
/// assert!(ops::recomputed_node().is_none());
/// ```
pub fn recomputed_node() -> Option<TensorId> {
    OUTERMOST.get()
}

/// Sets the node for the part with result `node`, until the return value is dropped.
pub(super) fn enter(node: TensorId) -> Restore {
    let before = OUTERMOST.get();
    OUTERMOST.set(before.or(Some(node)));
    Restore(before)
}

pub(super) struct Restore(Option<TensorId>);

impl Drop for Restore {
    fn drop(&mut self) {
        OUTERMOST.set(self.0);
    }
}
