//! GPipe: all forward passes, then all backward passes.

use super::Action;

/// Returns the actions: every micro-batch forward, then every micro-batch backward.
///
/// # Cost
/// The bubble is (P-1)/(M+P-1) of the time; all M micro-batches are alive at once.
///
/// # Source
/// Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019), section 2.3.
pub(super) fn actions(rank: usize, micro_batches: usize) -> Vec<Action> {
    let forward = (0..micro_batches).map(|m| Action::forward(rank, m));
    forward.chain((0..micro_batches).map(|m| Action::backward(rank, m))).collect()
}
