//! Naive schedule: one micro-batch at a time, all ranks but one are idle.

use super::Action;

/// Returns the actions: forward and backward of each micro-batch before the next one.
///
/// # Cost
/// P - 1 of P ranks are idle at any time, whatever the number of micro-batches. One micro-batch is alive.
pub(super) fn actions(rank: usize, micro_batches: usize) -> Vec<Action> {
    (0..micro_batches).flat_map(|m| [Action::forward(rank, m), Action::backward(rank, m)]).collect()
}
