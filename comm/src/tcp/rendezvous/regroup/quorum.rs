//! Who may go on.

use std::collections::BTreeSet;

/// Whether those who are `here` may go on as the group in place of `before`, of whom some are known to be `gone`: all but
/// these are here, or more than half of them, or half with the lowest of all. So no two parts of a group, neither of which
/// can see the other, both go on.
pub(super) fn may_go_on(before: &BTreeSet<usize>, here: &BTreeSet<usize>, gone: &BTreeSet<usize>) -> bool {
    let perhaps = before.difference(gone).filter(|number| !here.contains(number)).count();
    let present = before.intersection(here).count();
    let lowest = before.first().is_some_and(|number| here.contains(number));
    perhaps == 0 || present > perhaps || (present == perhaps && lowest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(numbers: impl IntoIterator<Item = usize>) -> BTreeSet<usize> {
        numbers.into_iter().collect()
    }

    #[test]
    fn those_who_are_gone_do_not_count() {
        assert!(may_go_on(&set(0..4), &set([3]), &set([0, 1, 2])));
        assert!(!may_go_on(&set(0..4), &set([3]), &set([0, 1])));
        assert!(may_go_on(&set(0..4), &set([2, 3]), &set([0])));
    }

    #[test]
    fn a_half_goes_on_where_it_has_the_lowest() {
        assert!(may_go_on(&set(0..2), &set([0]), &set([])));
        assert!(!may_go_on(&set(0..2), &set([1]), &set([])));
        assert!(!may_go_on(&set(0..5), &set([1, 2]), &set([0])));
    }

    #[test]
    fn newcomers_do_not_count() {
        assert!(!may_go_on(&set(0..3), &set([2, 3, 4]), &set([])));
    }

    proptest! {
        #[test]
        fn two_parts_never_both_go_on(of in proptest::collection::vec(0..3u8, 1..12), seen in any::<[u16; 2]>()) {
            // 0: gone; 1 and 2: two parts. Each part has seen some of those who are gone to be so.
            let part = |which| set((0..of.len()).filter(|number| of[*number] == which));
            let gone = |seen: u16| set(part(0).into_iter().filter(|number| seen >> number & 1 == 1));
            let (one, other, all) = (part(1), part(2), set(0..of.len()));
            prop_assume!(!one.is_empty() && !other.is_empty());
            prop_assert!(!(may_go_on(&all, &one, &gone(seen[0])) && may_go_on(&all, &other, &gone(seen[1]))));
        }
    }
}
