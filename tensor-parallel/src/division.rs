//! How a parameter is divided among ranks.

use crate::{Result, Split};

/// How a parameter is divided, and what becomes of its gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Division {
    pub(crate) split: Split,
    /// Whether its gradient is to be summed over the ranks.
    pub(crate) summed: bool,
    /// Whether the ranks need not divide its rows.
    pub(crate) uneven: bool,
}

impl From<Split> for Division {
    fn from(split: Split) -> Self {
        Self { split, summed: false, uneven: false }
    }
}

impl Division {
    /// By the tokens of a vocabulary.
    pub(crate) const VOCABULARY: Self = Self { split: Split::ROWS, summed: false, uneven: true };

    /// The shape of one rank's part of a weight.
    ///
    /// # Errors
    /// A shape that the ranks do not divide.
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
