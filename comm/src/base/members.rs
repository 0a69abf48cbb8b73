//! Members of a group, by their rank in the whole job. Messages and errors name ranks by that number.

use std::sync::Arc;

use crate::{Error, Result};

/// The most members listed in an error.
const LISTED: usize = 8;

/// The ranks of a group.
#[derive(Debug, Clone)]
pub(crate) struct Members {
    world_ranks: Arc<[usize]>,
    is_world: bool,
}

impl Members {
    /// Returns the group of all ranks of a job.
    pub(crate) fn world(world_size: usize) -> Self {
        Self { world_ranks: (0..world_size).collect(), is_world: true }
    }

    /// Returns the members of a subgroup, given the job's numbers in the order of their ranks in the group.
    pub(crate) fn subgroup(world_ranks: impl IntoIterator<Item = usize>) -> Self {
        Self { world_ranks: world_ranks.into_iter().collect(), is_world: false }
    }

    pub(crate) fn world_ranks(&self) -> &[usize] {
        &self.world_ranks
    }

    /// Returns the rank in the whole job of a rank of this group.
    pub(crate) fn world_rank(&self, rank: usize) -> usize {
        self.world_ranks.get(rank).copied().unwrap_or(rank)
    }

    /// Returns the rank in this group of a rank of the whole job.
    pub(crate) fn rank_of(&self, number: usize) -> Option<usize> {
        self.world_ranks.iter().position(|world_rank| *world_rank == number)
    }

    /// Returns the suffix for the description of a call; empty if the group is the whole job.
    pub(crate) fn suffix(&self) -> String {
        if self.is_world {
            return String::new();
        }
        let listed: Vec<String> = self.world_ranks.iter().take(LISTED).map(usize::to_string).collect();
        match self.world_ranks.len() - listed.len() {
            0 => format!(" in the group [{}]", listed.join(", ")),
            more => format!(" in the group [{}, and {more} more]", listed.join(", ")),
        }
    }
}

/// Returns the index of a rank among the members of a subgroup.
pub(crate) fn rank_in(rank: usize, ranks: &[usize]) -> Result<usize> {
    ranks.iter().position(|member| *member == rank).ok_or_else(|| {
        let got = format!("{ranks:?} on rank {rank}");
        Error::invalid("the ranks of a subgroup", got, "call this on its members only")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_named_by_its_members() {
        assert_eq!(Members::world(3).suffix(), "");
        let some = Members::subgroup([4, 2]);
        assert_eq!((some.suffix().as_str(), some.world_rank(1)), (" in the group [4, 2]", 2));
        let many = Members::subgroup(0..100).suffix();
        assert_eq!(many, " in the group [0, 1, 2, 3, 4, 5, 6, 7, and 92 more]");
    }
}
