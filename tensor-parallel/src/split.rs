//! Index arithmetic: which part of a weight belongs to which rank.

use std::ops::Range;

use training::internal::Runs;

use crate::{Error, Result};

/// Returns the range of `len` items that belongs to a rank. If `len` is not divisible by the number of ranks, the first ranks
/// have one more; there is no padding.
pub(crate) fn rank_range(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    let (each, more) = (len / ranks.max(1), len % ranks.max(1));
    let start = rank * each + rank.min(more);
    start..start + each + usize::from(rank < more)
}

/// How a weight is divided among the ranks of a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Every rank holds all of it.
    Whole,
    /// By rows, the first dimension. The rows consist of equally sized groups, and each rank has its part of each group:
    /// queries, keys and values in one weight are 3 groups. Usually there is 1. If the number of tokens of a vocabulary is
    /// not divisible by the number of ranks, the first ranks have one row more than the others.
    Rows {
        /// Number of groups of rows.
        groups: usize,
    },
    /// By columns, the second of two dimensions.
    Columns,
}

impl Split {
    /// Division by rows in a single group.
    pub const ROWS: Split = Split::Rows { groups: 1 };

    /// Returns the shape of one rank's shard.
    ///
    /// # Errors
    /// With the weight's `name`, [`Error::Indivisible`]; [`Error::Invalid`] if it lacks that dimension.
    ///
    /// ```
    /// use tensor_parallel::Split;
    ///
    /// assert_eq!(Split::ROWS.shard_dims("fc1.weight", &[8, 6], 2)?, [4, 6]);
    /// assert_eq!(Split::Columns.shard_dims("fc2.weight", &[8, 6], 2)?, [8, 3]);
    /// assert!(Split::Columns.shard_dims("fc2.weight", &[8, 6], 4).is_err());
    /// # Ok::<(), tensor_parallel::Error>(())
    /// ```
    pub fn shard_dims(self, name: &str, dims: &[usize], ranks: usize) -> Result<Vec<usize>> {
        let (dim, parts, what, place) = match self {
            Split::Whole => return Ok(dims.to_vec()),
            Split::Rows { groups } => (0, ranks * groups.max(1), "rows", "first"),
            Split::Columns => (1, ranks, "columns", "second"),
        };
        let Some(&size) = dims.get(dim) else {
            let help =
                format!("it is to be divided by {what}, its {place} dimension: give a shape that has one");
            return Err(Error::invalid(&format!("the shape of {name}"), format!("{dims:?}"), help));
        };
        if !size.is_multiple_of(parts) {
            return Err(Error::Indivisible { what: format!("the {what} of {name}"), size, parts, ranks });
        }
        let mut shard = dims.to_vec();
        shard[dim] = size / ranks;
        Ok(shard)
    }

    /// Returns the shape of a rank's shard; the number of rows need not be divisible by the number of ranks.
    ///
    /// # Errors
    /// Fewer rows than ranks.
    pub(crate) fn uneven_dims(
        self,
        name: &str,
        dims: &[usize],
        (rank, ranks): (usize, usize),
    ) -> Result<Vec<usize>> {
        let (Split::Rows { groups: 0 | 1 }, Some(&rows)) = (self, dims.first()) else {
            return self.shard_dims(name, dims, ranks);
        };
        if rows < ranks {
            let help = format!("give one at least for each of the {ranks} tensor-parallel ranks");
            return Err(Error::invalid(&format!("the rows of {name}"), rows, help));
        }
        let mut shard = dims.to_vec();
        shard[0] = rank_range(rows, rank, ranks).len();
        Ok(shard)
    }

    /// Returns where the shard of `rank` lies in the flat weight. Columns, and rows of several groups, must be divisible.
    pub(crate) fn runs(self, dims: &[usize], rank: usize, ranks: usize) -> Runs {
        let all: usize = dims.iter().product();
        let count = match self {
            Split::Whole => return Runs { start: 0, len: all, stride: all, count: 1 },
            Split::Rows { groups: 0 | 1 } => {
                let (width, own) = (dims[1..].iter().product::<usize>(), rank_range(dims[0], rank, ranks));
                return Runs { start: own.start * width, len: own.len() * width, stride: all, count: 1 };
            }
            Split::Rows { groups } => groups.max(1),
            Split::Columns => dims[0],
        };
        let stride = all / count.max(1);
        let len = stride / ranks;
        Runs { start: rank * len, len, stride, count }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split() -> impl Strategy<Value = Split> {
        prop_oneof![(1..4usize).prop_map(|groups| Split::Rows { groups }), Just(Split::Columns)]
    }

    proptest! {
        /// Uneven shards are consecutive, of the size that their shape says, and differ by one row at most.
        #[test]
        fn uneven_shards_are_a_partition(ranks in 1..6usize, more in 0..20usize, width in 1..4usize) {
            let dims = [ranks + more, width];
            let all: Vec<usize> = (0..dims[0] * width).collect();
            let (mut seen, mut rows) = (vec![], vec![]);
            for rank in 0..ranks {
                let shard = Split::ROWS.runs(&dims, rank, ranks).take(&all);
                let shape = Split::ROWS.uneven_dims("w", &dims, (rank, ranks)).unwrap();
                prop_assert_eq!(shard.len(), shape.iter().product::<usize>());
                if dims[0].is_multiple_of(ranks) {
                    prop_assert_eq!(&shape, &Split::ROWS.shard_dims("w", &dims, ranks).unwrap());
                }
                rows.push(shape[0]);
                seen.extend(shard);
            }
            prop_assert_eq!(seen, all);
            prop_assert!(rows.is_sorted_by(|a, b| a >= b) && rows[0] - rows[ranks - 1] <= 1);
        }

        /// Every element is in exactly one shard, and a shard is of the size that its shape says.
        #[test]
        fn shards_are_a_partition(split in split(), ranks in 1..5usize, a in 1..4usize, b in 1..4usize) {
            let groups = if let Split::Rows { groups } = split { groups } else { 1 };
            let dims = [a * groups * ranks, b * ranks];
            let all: Vec<usize> = (0..dims[0] * dims[1]).collect();
            let mut seen = vec![];
            for rank in 0..ranks {
                let shard = split.runs(&dims, rank, ranks).take(&all);
                prop_assert_eq!(shard.len(), split.shard_dims("w", &dims, ranks).unwrap().iter().product::<usize>());
                seen.extend(shard);
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, all);
        }
    }

    #[test]
    fn a_shape_without_the_dimension_is_said_to_be_at_fault() {
        let line = |split: Split, dims: &[usize]| split.shard_dims("x", dims, 2).unwrap_err().to_string();
        let columns = line(Split::Columns, &[4]);
        assert!(columns.starts_with("the shape of x: got [4]; it is to be divided by columns"), "{columns}");
        let rows = line(Split::ROWS, &[]);
        assert!(rows.starts_with("the shape of x: got []; it is to be divided by rows"), "{rows}");
    }

    #[test]
    fn groups_of_rows_are_divided_each() {
        let rows: Vec<usize> = (0..12).collect();
        let shard = Split::Rows { groups: 3 }.runs(&[12], 1, 2).take(&rows);
        assert_eq!(shard, [2, 3, 6, 7, 10, 11]);
        assert_eq!(Split::Columns.runs(&[2, 6], 2, 3).take(&rows), [4, 5, 10, 11]);
        assert_eq!(Split::Whole.runs(&[12], 1, 2).take(&rows), rows);
        let line = Split::Rows { groups: 3 }.shard_dims("qkv.weight", &[12, 4], 8).unwrap_err().to_string();
        assert!(line.starts_with("the rows of qkv.weight: 12 cannot be divided"), "{line}");
    }
}
