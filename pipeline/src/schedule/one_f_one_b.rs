//! 1F1B: a micro-batch's backward runs as soon as possible.

use super::Action;

/// Returns the actions: enough forward passes to keep the following ranks busy, then one backward and one forward
/// alternately.
///
/// # Cost
/// The bubble is GPipe's, (P-1)/(M+P-1) of the time; at most P - rank micro-batches are alive, however many there are.
///
/// # Source
/// Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), section 3.2, with a flush after
/// each batch.
pub(super) fn actions(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let ahead = (ranks - rank).min(micro_batches);
    let mut actions: Vec<_> = (0..ahead).map(|m| Action::forward(rank, m)).collect();
    for m in 0..micro_batches {
        actions.push(Action::backward(rank, m));
        if m + ahead < micro_batches {
            actions.push(Action::forward(rank, m + ahead));
        }
    }
    actions
}
