//! Bucket plan: assigns each gradient to a bucket and an offset. Pure data, the same on every rank.

/// Size and kind of one gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) elements: usize,
    pub(crate) bytes: usize,
    /// Number of its combination of dtype, device and group; all items of a bucket are of one kind.
    pub(crate) kind: usize,
    /// Place of the group of ranks that it is averaged over.
    pub(crate) group: usize,
}

/// Buckets in the order in which they are communicated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) buckets: Vec<Bucket>,
    /// By item: its bucket and offset.
    pub(crate) places: Vec<BucketSlot>,
}

/// Contents of one flat tensor: items, one after the other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) items: Vec<usize>,
    pub(crate) elements: usize,
}

/// Position of one item.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct BucketSlot {
    pub(crate) bucket: usize,
    /// Offset in the bucket, in elements.
    pub(crate) offset: usize,
}

/// A bucket that is still being filled.
#[derive(Default)]
struct Open {
    bucket: Bucket,
    bytes: usize,
    /// Number of full buckets of this kind.
    full: usize,
}

impl Plan {
    /// Distributes `items` to buckets in the given order, which contains each index once. A bucket contains at most `bytes`,
    /// the first one of each kind `first_bytes`, or a single item that is larger. Buckets are ordered by when they are
    /// complete if the gradients arrive in this order.
    pub(crate) fn new(items: &[Item], order: &[usize], first_bytes: usize, bytes: usize) -> Self {
        let kinds = items.iter().map(|item| item.kind + 1).max().unwrap_or(0);
        let mut open: Vec<Open> = (0..kinds).map(|_| Open::default()).collect();
        // Full buckets, each with the position of its last item in the order.
        let mut closed: Vec<(usize, Bucket)> = Vec::new();
        let mut last = vec![0; kinds];
        for (position, &index) in order.iter().enumerate() {
            let item = items[index];
            let target = &mut open[item.kind];
            let limit = if target.full == 0 { first_bytes } else { bytes };
            if !target.bucket.items.is_empty() && target.bytes + item.bytes > limit {
                closed.push((last[item.kind], std::mem::take(&mut target.bucket)));
                target.full += 1;
                target.bytes = 0;
            }
            target.bucket.items.push(index);
            target.bucket.elements += item.elements;
            target.bytes += item.bytes;
            last[item.kind] = position;
        }
        let rest = open.into_iter().zip(last).filter(|(open, _)| !open.bucket.items.is_empty());
        closed.extend(rest.map(|(open, last)| (last, open.bucket)));
        closed.sort_by_key(|(last, _)| *last);
        Self::with_places(closed.into_iter().map(|(_, bucket)| bucket).collect(), items)
    }

    fn with_places(buckets: Vec<Bucket>, items: &[Item]) -> Self {
        let mut places = vec![BucketSlot::default(); items.len()];
        for (number, bucket) in buckets.iter().enumerate() {
            let mut offset = 0;
            for &index in &bucket.items {
                places[index] = BucketSlot { bucket: number, offset };
                offset += items[index].elements;
            }
        }
        Self { buckets, places }
    }
}

/// Returns a permutation of `0..count`: first the valid indices of `seen`, then the others in descending order, because
/// backward computes the last layer's gradients first.
pub(crate) fn complete(seen: impl IntoIterator<Item = usize>, count: usize) -> Vec<usize> {
    let mut missing = vec![true; count];
    let mut order: Vec<usize> = seen
        .into_iter()
        .filter(|&index| index < count && std::mem::replace(&mut missing[index], false))
        .collect();
    order.extend((0..count).rev().filter(|&index| missing[index]));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn item(bytes: usize, kind: usize) -> Item {
        Item { elements: bytes / 4, bytes, kind, group: 0 }
    }

    #[test]
    fn the_first_bucket_is_smaller() {
        let items = [item(4, 0); 7];
        let plan = Plan::new(&items, &complete([], 7), 8, 16);
        let buckets: Vec<_> = plan.buckets.iter().map(|bucket| bucket.items.clone()).collect();
        assert_eq!(buckets, [vec![6, 5], vec![4, 3, 2, 1], vec![0]]);
        assert_eq!(plan.places[3], BucketSlot { bucket: 1, offset: 1 });
    }

    #[test]
    fn kinds_do_not_mix_and_buckets_follow_readiness() {
        let items = [item(4, 0), item(4, 1), item(4, 0), item(4, 1)];
        let plan = Plan::new(&items, &[0, 1, 2, 3], 8, 8);
        let buckets: Vec<_> = plan.buckets.iter().map(|bucket| bucket.items.clone()).collect();
        assert_eq!(buckets, [vec![0, 2], vec![1, 3]]);
    }

    proptest! {
        #[test]
        fn every_item_has_one_place(
            sizes in proptest::collection::vec((0usize..50, 0usize..3), 0..40),
            seen in proptest::collection::vec(0usize..60, 0..40),
            first_bytes in 0usize..200,
            bytes in 0usize..200,
        ) {
            let items: Vec<Item> = sizes.iter().map(|&(elements, kind)| item(elements * 4, kind)).collect();
            let order = complete(seen, items.len());
            let plan = Plan::new(&items, &order, first_bytes, bytes);
            let mut all: Vec<usize> = plan.buckets.iter().flat_map(|bucket| bucket.items.clone()).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..items.len()).collect::<Vec<_>>());
            for (number, bucket) in plan.buckets.iter().enumerate() {
                let mut offset = 0;
                for &index in &bucket.items {
                    prop_assert_eq!(plan.places[index], BucketSlot { bucket: number, offset });
                    prop_assert_eq!(items[index].kind, items[bucket.items[0]].kind);
                    offset += items[index].elements;
                }
                prop_assert_eq!(bucket.elements, offset);
                prop_assert!(bucket.items.len() == 1 || offset * 4 <= first_bytes.max(bytes));
            }
            let position = |index: usize| order.iter().position(|&other| other == index);
            let ready: Vec<_> =
                plan.buckets.iter().map(|bucket| bucket.items.iter().map(|&i| position(i)).max()).collect();
            prop_assert!(ready.is_sorted());
        }
    }
}
