//! Chains of ranks that wait for each other, across all groups of a job: finds the rank at the end of a chain.

use std::collections::VecDeque;

use super::{Activity, Status};
use crate::base::cause::{Cause, NO_ANSWER};

/// Returns the cause if `asker` waits for `first`, these wait for others, and so on. It is the first rank found that
/// does not answer, else the cause that one of the ranks has failed with, else a rank that has left, else a rank that
/// is in no operation. `None` if all of them wait, or are busy in a call.
pub(super) fn cause_at_end(asker: usize, first: &[usize], statuses: &[Status]) -> Option<Cause> {
    let mut next: VecDeque<usize> = first.iter().copied().collect();
    let (mut seen, mut reached) = (vec![false; statuses.len()], Vec::new());
    while let Some(rank) = next.pop_front() {
        let Some(status) = statuses.get(rank).filter(|_| rank != asker && !seen[rank]) else { continue };
        seen[rank] = true;
        reached.push((rank, status));
        next.extend(status.activity().into_iter().flat_map(Activity::waits));
    }
    // A rank that is in a call continues without the group that has failed, or does not know of the failure yet.
    let ending = |status: &Status| status.activity().filter(|activity| activity.is_outside())?.failed.clone();
    let blamed = || reached.iter().find_map(|(_, status)| ending(status));
    let find = |is: fn(&Status) -> bool| reached.iter().find(|(_, status)| is(status)).copied();
    if let Some((rank, _)) = find(|status| *status == Status::Silent) {
        return Some(Cause::Stalled { rank, detail: NO_ANSWER.into() });
    }
    if let Some(cause) = blamed() {
        return Some(cause);
    }
    if let Some((rank, _)) = find(|status| *status == Status::Left) {
        return Some(Cause::Left { rank });
    }
    let (rank, status) = find(|status| status.activity().is_some_and(Activity::is_outside))?;
    Some(Cause::Stalled { rank, detail: status.activity()?.describe() })
}
