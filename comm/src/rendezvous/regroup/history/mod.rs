//! Group history of a job, as far as a rank knows it, and the rule for which ranks may form the next group, so that there
//! are never two groups. No sockets here; [`regroup`](super) describes how ranks use it.
//!
//! A group is formed from the one before it, by ranks that agree to it. Some members are then missing, of which a few are
//! *known to have ended* ([`super::search`] describes what proves that). Those that are there may form the next group if
//! they are
//!
//! - more than half of the members of the group before, those that have ended included; or
//! - half of them, with the lowest of all; or
//! - all but those that are known to have ended.
//!
//! So a rank that cannot be reached counts as alive. Two parts of a group without a common member cannot both go on: they
//! cannot both be more than half, nor both be the half with the lowest rank, and the last case requires proof that the
//! whole other part has ended. A rank that has ended still counts as missing, because it may have formed a group with
//! others before: `0` and `1` of four go on without `2` and `3`, then `0` ends; if it did not count, `2` and `3` would be
//! more than `1`.
//!
//! Where two parts have a common member, what that member has agreed to is decisive. Each rank keeps the members of the
//! newest group that is known to have met, and of those that it has agreed to since without learning whether they met
//! (their leader ended, for instance). The next group must satisfy the rule for each of these. Groups are numbered. All
//! members promise the new number before anyone agrees, so that of two such groups the one with the higher number was
//! formed later, and no rank that made it possible agrees to the lower one any more.
//!
//! Newcomers could outlive all original ranks of a part. The ranks that it had left behind, once they know that all the
//! others have ended, would then go on as well. So where ranks that may still be alive were left behind, a rank that was
//! a member before must be among those that go on.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

type Ranks = BTreeSet<usize>;

/// What a rank knows of the groups that its job has had.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct History {
    /// The number of the newest of these groups.
    pub(super) newest: u64,
    /// The number of the first of them, which is known to have met.
    pub(super) met: u64,
    /// Members of the newest group that is known to have met, then of those that were agreed to since. Empty where
    /// nothing is known.
    groups: Vec<Ranks>,
    /// Where ranks that may still be alive were left behind: the remaining members of the group that left them behind.
    elders: Ranks,
    /// Missing members of these groups that are known to have ended.
    ended: Ranks,
}

impl History {
    /// Returns the history of a job whose first group has met.
    pub(super) fn first(members: Ranks) -> Self {
        Self { groups: vec![members], ..Self::default() }
    }

    pub(super) fn is_known(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Returns whether this rank is a member of the newest group that has met.
    pub(super) fn has_met_with(&self, number: usize) -> bool {
        self.groups.first().is_some_and(|members| members.contains(&number))
    }

    /// Returns the ranks that may be in the next group, besides newcomers.
    pub(super) fn members(&self) -> Ranks {
        self.groups.last().cloned().unwrap_or_default()
    }

    /// Returns the members below this rank, which may be in the next group.
    pub(super) fn lower_members(&self, own: usize) -> impl Iterator<Item = usize> {
        self.groups.last().into_iter().flat_map(move |members| members.range(..own).copied())
    }

    /// Returns all that it contains, but the ranks that have ended, as numbers.
    pub(super) fn words(&self) -> impl Iterator<Item = u64> {
        let sets = self.groups.iter().chain([&self.elders]);
        let words = sets.flat_map(|set| [set.len() as u64].into_iter().chain(set.iter().map(|n| *n as u64)));
        [self.newest, self.met, self.groups.len() as u64].into_iter().chain(words)
    }

    /// Returns all ranks that count for the next group.
    pub(super) fn all(&self) -> Ranks {
        self.groups.iter().flatten().copied().collect()
    }

    /// Records that these ranks have ended.
    pub(super) fn add_ended(&mut self, ranks: impl IntoIterator<Item = usize>) {
        self.ended.extend(ranks);
    }

    /// Returns it with these as the ranks that have ended.
    pub(super) fn with_ended(self, ended: Ranks) -> Self {
        Self { ended, ..self }
    }

    pub(super) fn ended(&self) -> &Ranks {
        &self.ended
    }

    /// Returns whether the ranks that are `here` may form the next group.
    pub(super) fn may_form(&self, here: &Ranks) -> bool {
        let outlived = self.elders.is_empty() || !self.elders.is_disjoint(here);
        outlived && self.groups.iter().all(|members| self.is_quorum(members, here))
    }

    fn is_quorum(&self, members: &Ranks, here: &Ranks) -> bool {
        let present = members.intersection(here).count();
        let missing = members.len() - present;
        let all_have_ended = members.difference(here).all(|number| self.ended.contains(number));
        let has_lowest = members.first().is_some_and(|lowest| here.contains(lowest));
        present > 0 && (all_have_ended || present > missing || present == missing && has_lowest)
    }

    /// Returns the history with the next group, once that is agreed to.
    pub(super) fn with_group(&self, newest: u64, members: Ranks) -> Self {
        let mut next = Self { newest, ..self.clone() };
        let left_behind = self.all().iter().any(|n| !members.contains(n) && !self.ended.contains(n));
        // A rank that was left behind may have ended since; whether that was before any newcomer was admitted is not
        // known.
        if left_behind || !self.elders.is_empty() {
            let was_there = |number: &usize| self.groups.iter().all(|members| members.contains(number));
            let is_elder = |number: &usize| self.elders.is_empty() || self.elders.contains(number);
            next.elders = members.iter().copied().filter(|n| was_there(n) && is_elder(n)).collect();
        }
        // With the same members again, the next group has nothing more to satisfy.
        if next.groups.last() != Some(&members) {
            next.groups.push(members);
        }
        next
    }

    /// Returns the history once the newest group has met.
    pub(super) fn met(self) -> Self {
        let groups = self.groups.into_iter().next_back().into_iter().collect();
        Self { groups, met: self.newest, ended: Ranks::new(), ..self }
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests {
    use super::*;

    fn set(numbers: impl IntoIterator<Item = usize>) -> Ranks {
        numbers.into_iter().collect()
    }

    fn may_go_on(before: Ranks, here: &[usize], ended: &[usize]) -> bool {
        let mut history = History::first(before);
        history.add_ended(ended.iter().copied());
        history.may_form(&set(here.iter().copied()))
    }

    #[test]
    fn a_half_goes_on_where_it_has_the_lowest() {
        assert!(may_go_on(set(0..2), &[0], &[]));
        assert!(!may_go_on(set(0..2), &[1], &[]));
        assert!(!may_go_on(set(0..5), &[1, 2], &[0]));
        assert!(may_go_on(set(0..5), &[2, 3, 4], &[]));
    }

    #[test]
    fn all_others_have_to_have_ended_where_less_than_half_is_left() {
        assert!(may_go_on(set(0..4), &[3], &[0, 1, 2]));
        assert!(!may_go_on(set(0..4), &[3], &[0, 1]));
        // 0 and 1 may have gone on without these before 0 ended.
        assert!(!may_go_on(set(0..4), &[2, 3], &[0]));
    }

    #[test]
    fn newcomers_do_not_count() {
        assert!(!may_go_on(set(0..3), &[2, 3, 4], &[]));
        assert!(!may_go_on(set(0..2), &[2], &[0, 1]));
    }

    #[test]
    fn what_may_have_met_counts_as_well_as_what_has() {
        let agreed = History::first(set(0..5)).with_group(1, set(0..3));
        assert!(agreed.may_form(&set(0..3)));
        // Two of three, but not of five.
        assert!(!agreed.may_form(&set(0..2)));
        assert!(agreed.clone().met().may_form(&set(0..2)));
        // Three of five, but not of three.
        assert!(!agreed.may_form(&set([2, 3, 4])));
    }

    #[test]
    fn newcomers_alone_are_not_the_group_while_one_was_left_behind() {
        let left_behind = History::first(set(0..3)).with_group(1, set(0..2)).met();
        let mut grown = left_behind.with_group(2, set([0, 1, 3])).met();
        grown.add_ended([0]);
        assert!(grown.may_form(&set([1, 3])));
        grown.add_ended([1]);
        assert!(!grown.may_form(&set([3])));
        let mut whole = History::first(set(0..2)).with_group(1, set([0, 1, 3])).met();
        whole.add_ended([0, 1]);
        assert!(whole.may_form(&set([3])));
    }
}
