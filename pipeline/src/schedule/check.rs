//! Static checks of a table: completeness, and the number of live activations.

use std::collections::HashSet;

use super::{Action, ActionKind, Table};
use crate::{Error, Result};

/// Checks that every micro-batch runs forward and backward exactly once through every stage, on the stage's rank, and that
/// messages are only between stages of different ranks.
pub(super) fn complete(table: &Table) -> Result<()> {
    let (ranks, stages, micro_batches) = (table.ranks(), table.stages(), table.micro_batches);
    let bad = |reason: String| Err(Error::BadTable { reason });
    if ranks == 0 || stages == 0 || micro_batches == 0 {
        return bad(format!("it has {ranks} ranks, {stages} stages and {micro_batches} micro-batches"));
    }
    if let Some((stage, owner)) = table.owners.iter().enumerate().find(|(_, owner)| **owner >= ranks) {
        return bad(format!("stage {stage} is given to rank {owner} of {ranks}"));
    }
    let mut seen = HashSet::new();
    for (rank, actions) in table.actions.iter().enumerate() {
        for &action in actions {
            let Action { stage, micro_batch, .. } = action;
            if stage >= stages || micro_batch >= micro_batches {
                return bad(format!("rank {rank} has {action}, which does not exist"));
            }
            if table.owners[stage] != rank {
                return bad(format!("rank {rank} has {action}, which is rank {}'s", table.owners[stage]));
            }
            if !has_peer(table, action) {
                return bad(format!("rank {rank} has {action}, but there is no other rank at that end"));
            }
            if !parts(action.kind).iter().all(|&part| seen.insert(action.as_kind(part))) {
                return bad(format!("rank {rank} has {action} twice"));
            }
        }
    }
    for (stage, &rank) in table.owners.iter().enumerate() {
        for micro_batch in 0..micro_batches {
            let needed = [ActionKind::Forward, ActionKind::BackwardInput, ActionKind::BackwardWeight];
            let mut needed = needed.into_iter().map(|kind| Action { kind, stage, micro_batch });
            if let Some(action) = needed.find(|action| !seen.contains(action)) {
                return bad(format!("rank {rank} lacks {action}"));
            }
        }
    }
    Ok(())
}

/// Returns the smallest parts of an action: a whole backward consists of two.
pub(super) fn parts(kind: ActionKind) -> &'static [ActionKind] {
    match kind {
        ActionKind::Forward => &[ActionKind::Forward],
        ActionKind::Backward => &[ActionKind::BackwardInput, ActionKind::BackwardWeight],
        ActionKind::BackwardInput => &[ActionKind::BackwardInput],
        ActionKind::BackwardWeight => &[ActionKind::BackwardWeight],
        ActionKind::SendActivation => &[ActionKind::SendActivation],
        ActionKind::RecvActivation => &[ActionKind::RecvActivation],
        ActionKind::SendGradient => &[ActionKind::SendGradient],
        ActionKind::RecvGradient => &[ActionKind::RecvGradient],
    }
}

/// Returns true unless it is a message without another rank at the other end.
fn has_peer(table: &Table, action: Action) -> bool {
    match action.kind {
        ActionKind::SendActivation | ActionKind::RecvGradient => table.sender_after(action.stage).is_some(),
        ActionKind::RecvActivation | ActionKind::SendGradient => table.sender_before(action.stage).is_some(),
        _ => true,
    }
}

/// Returns the largest number of activations that are alive at once, by rank.
pub(super) fn live(table: &Table) -> Vec<usize> {
    let of_rank = |actions: &Vec<Action>| {
        let (mut now, mut most) = (0usize, 0);
        for action in actions {
            match action.kind {
                ActionKind::Forward => now += 1,
                ActionKind::Backward | ActionKind::BackwardWeight => now = now.saturating_sub(1),
                _ => {}
            }
            most = most.max(now);
        }
        most
    };
    table.actions.iter().map(of_rank).collect()
}
