//! Interleaved 1F1B: several stages per rank, so that the pipeline fills faster.

use super::{Action, one_f_one_b};

/// Returns the actions: 1F1B that cycles through the rank's stages, P micro-batches through each before the next one.
///
/// # Cost
/// With v stages per rank the bubble is (P-1)/(vM+P-1) of the time if M is a multiple of P; v times as many messages as 1F1B.
/// At most (v-1)P + 2(P-1-rank) + 1 stages' activations are alive.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 2.2.
/// Other numbers of micro-batches use the table of the next multiple of P, without the surplus micro-batches.
pub(super) fn actions(
    rank: usize,
    ranks: usize,
    stages_per_rank: usize,
    micro_batches: usize,
) -> Vec<Action> {
    if stages_per_rank == 1 {
        return one_f_one_b::actions(rank, ranks, micro_batches);
    }
    let rounds = micro_batches.div_ceil(ranks);
    let total = rounds * ranks * stages_per_rank;
    // The k-th pass of a rank, in forward order: index of its stage, and micro-batch.
    let chunk_and_micro_batch = |k: usize| {
        let (round, rest) = (k / (ranks * stages_per_rank), k % (ranks * stages_per_rank));
        (rest / ranks, round * ranks + rest % ranks)
    };
    let forward = |k: usize| {
        let (chunk, m) = chunk_and_micro_batch(k);
        Action::forward(chunk * ranks + rank, m)
    };
    let backward = |k: usize| {
        let (chunk, m) = chunk_and_micro_batch(k);
        Action::backward((stages_per_rank - 1 - chunk) * ranks + rank, m)
    };
    let ahead = ((stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1).min(total);
    let mut actions: Vec<_> = (0..ahead).map(forward).collect();
    for k in 0..total {
        actions.push(backward(k));
        if k + ahead < total {
            actions.push(forward(k + ahead));
        }
    }
    actions.retain(|action| action.micro_batch < micro_batches);
    actions
}
