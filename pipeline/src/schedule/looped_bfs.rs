//! Looped breadth-first pipeline: several stages per rank, all micro-batches through one stage before the next.

use super::Action;

/// Returns the actions: all micro-batches forward through the rank's first stage, then through its second, and so on;
/// backward in reverse order of stages.
///
/// # Cost
/// With v stages per rank and at least P micro-batches the bubble is (P-1)/(vM+P-1) of the time. All micro-batches are alive
/// in all stages at once. The gradients of a stage are complete long before those of the previous stage, which leaves time to
/// average them.
///
/// # Source
/// Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2023), section 4.1.
pub(super) fn actions(
    rank: usize,
    ranks: usize,
    stages_per_rank: usize,
    micro_batches: usize,
) -> Vec<Action> {
    let stages = (0..stages_per_rank).map(|chunk| chunk * ranks + rank);
    let forward = stages.clone().flat_map(|stage| (0..micro_batches).map(move |m| Action::forward(stage, m)));
    let backward = stages.rev().flat_map(|stage| (0..micro_batches).map(move |m| Action::backward(stage, m)));
    forward.chain(backward).collect()
}
