//! Where backward is while it computes a part again.

use std::cell::Cell;

use candle_core::TensorId;

thread_local! {
    static OUTERMOST: Cell<Option<TensorId>> = const { Cell::new(None) };
}

/// The result of the part that this thread computes again now, in the graph that backward goes through; that of the outermost where
/// parts lie in one another. None outside of [`recompute`](crate::recompute)'s backward. For what gathers and releases parameters.
///
/// ```
/// assert!(training::recomputed_node().is_none());
/// ```
pub fn recomputed_node() -> Option<TensorId> {
    OUTERMOST.get()
}

/// Backward has come to a part that gave `node`, until the result is dropped.
pub(super) fn at(node: TensorId) -> Restore {
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
