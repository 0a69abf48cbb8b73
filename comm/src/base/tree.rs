//! Tree of ranks along which something that rank 0 has reaches all: each rank passes it to `arity` others at most, so that none
//! sends more than a few copies.

use std::ops::Range;

/// Returns the rank from which a rank other than 0 gets it.
pub(crate) fn parent(rank: usize, arity: usize) -> usize {
    rank.saturating_sub(1) / arity
}

/// Returns the ranks to which a rank of `world_size` passes it.
pub(crate) fn children(rank: usize, world_size: usize, arity: usize) -> Range<usize> {
    let first = rank * arity + 1;
    first.min(world_size)..(first + arity).min(world_size)
}

/// Returns over how many others it comes to a rank, plus one; 0 for rank 0.
pub(crate) fn depth(rank: usize, arity: usize) -> usize {
    if rank == 0 { 0 } else { 1 + depth(parent(rank, arity), arity) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_one_parent_that_comes_before_it() {
        for (world_size, arity) in [(1, 4), (2, 4), (5, 4), (6, 4), (17, 16), (1000, 16), (1000, 2)] {
            let mut passed = vec![0];
            for rank in 0..world_size {
                let children = children(rank, world_size, arity);
                assert!(children.len() <= arity);
                passed.extend(children.inspect(|child| assert_eq!(parent(*child, arity), rank)));
            }
            assert_eq!(passed, (0..world_size).collect::<Vec<_>>());
            assert!(
                passed
                    .iter()
                    .skip(1)
                    .all(|&rank| depth(rank, arity) == 1 + depth(parent(rank, arity), arity))
            );
        }
    }
}
