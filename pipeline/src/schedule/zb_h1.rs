//! ZB-H1: 1F1B in which the weight gradients fill idle time.

use super::Action;

/// Returns the actions: 1F1B with backward in two parts. Rank r delays the weight part by r micro-batches, so that no rank
/// keeps more than P micro-batches alive.
///
/// # Cost
/// With times F, I and W of forward and the two parts of backward, the bubble is (P-1)(F+I-W) if there are at least P
/// micro-batches: a third of 1F1B's if the three are equal. At most P micro-batches are alive.
///
/// # Source
/// Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
pub(super) fn actions(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let ahead = (ranks - rank).min(micro_batches);
    let mut actions: Vec<_> = (0..ahead).map(|m| Action::forward(rank, m)).collect();
    for m in 0..micro_batches {
        actions.push(Action::input(rank, m));
        if m >= rank {
            actions.push(Action::weight(rank, m - rank));
        }
        if m + ahead < micro_batches {
            actions.push(Action::forward(rank, m + ahead));
        }
    }
    actions.extend((micro_batches.saturating_sub(rank)..micro_batches).map(|m| Action::weight(rank, m)));
    actions
}
