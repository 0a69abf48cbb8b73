//! The number of positions of an epoch for one rank, and the handling of the last samples.

use serde::{Deserialize, Serialize};

use crate::SamplerError;

/// How the last samples are handled if the number of samples is not divisible by the number of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tail {
    /// All ranks get the same number of samples: the first ones of the epoch are repeated at its end (PyTorch's
    /// default).
    #[default]
    Pad,
    /// All ranks get the same number of samples: the last ones are dropped (PyTorch's `drop_last=True`).
    Drop,
    /// Each sample is used exactly once: the first ranks get one more. For evaluation, where each sample counts once.
    Uneven,
}

/// Number of the `remaining` positions for a rank that takes every `num_replicas`-th, beginning at position `rank`.
pub(crate) fn share_len(
    remaining: usize,
    num_replicas: usize,
    rank: usize,
    tail: Tail,
) -> Result<usize, SamplerError> {
    if num_replicas == 0 {
        return Err(SamplerError::NoReplicas);
    }
    if rank >= num_replicas {
        return Err(SamplerError::RankOutOfRange { rank, num_replicas });
    }
    Ok(match tail {
        Tail::Pad => remaining.div_ceil(num_replicas),
        Tail::Drop => remaining / num_replicas,
        Tail::Uneven => remaining.saturating_sub(rank).div_ceil(num_replicas),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_at_the_edges() {
        let of =
            |remaining, num_replicas, rank, tail| share_len(remaining, num_replicas, rank, tail).unwrap();
        assert_eq!(of(0, 3, 2, Tail::Pad), 0);
        assert_eq!(of(1, 3, 2, Tail::Pad), 1);
        assert_eq!(of(1, 3, 2, Tail::Drop), 0);
        assert_eq!(of(1, 3, 0, Tail::Uneven), 1);
        assert_eq!(of(1, 3, 1, Tail::Uneven), 0);
        assert_eq!(of(usize::MAX, 1, 0, Tail::Pad), usize::MAX);
        assert_eq!(of(usize::MAX, usize::MAX, usize::MAX - 1, Tail::Uneven), 1);
        assert!(share_len(5, 0, 0, Tail::Pad).is_err());
        assert!(share_len(5, 2, 2, Tail::Pad).is_err());
    }
}
