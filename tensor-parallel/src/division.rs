//! How a parameter is divided among ranks, and how its gradient is combined.

use crate::{Result, Split};

/// How a parameter is divided, and how its gradient is combined.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    pub(crate) split: Split,
    /// Whether its gradient is to be summed over the ranks.
    pub(crate) summed: bool,
    /// Whether the number of rows need not be divisible by the number of ranks.
    pub(crate) uneven: bool,
}

impl From<Split> for Division {
    fn from(split: Split) -> Self {
        Self { split, summed: false, uneven: false }
    }
}

impl Division {
    /// Division of a vocabulary by tokens.
    pub(crate) const VOCABULARY: Self = Self { split: Split::ROWS, summed: false, uneven: true };

    /// Returns the shape of one rank's part of a weight.
    ///
    /// # Errors
    /// A dimension that is not divisible by the number of ranks.
    pub(crate) fn dims(
        self,
        name: &str,
        dims: &[usize],
        (rank, ranks): (usize, usize),
    ) -> Result<Vec<usize>> {
        match self.uneven {
            true => self.split.uneven_dims(name, dims, (rank, ranks)),
            false => self.split.shard_dims(name, dims, ranks),
        }
    }
}
