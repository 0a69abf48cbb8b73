//! The documents of packed rows.

use std::cell::Cell;
use std::iter::repeat_n;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::RowContext;
use crate::warning::warn;
use crate::{Error, Result};

thread_local! {
    /// How often an operation on this thread has asked for documents.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

/// Whether a scope without effect has been reported.
static REPORTED: AtomicBool = AtomicBool::new(false);

/// Where the documents of packed rows begin: in a [`scope`](Self::scope) of them, a packed row is computed as its documents alone
/// would be. In [`attention`](crate::attention) a position sees its own document only, whatever else is masked;
/// [`Rotary`](crate::Rotary) embedding begins anew in each. Places of a row after its last document are unused: each is a
/// document of its own; their targets should not count.
///
/// A model with position embeddings of its own takes its [`positions`](Self::positions).
///
/// # Cost
/// Clones share the numbers. Attention on a CPU takes the time of the documents, not of the row.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ops::{AttentionConfig, AttentionMask, Documents, attention};
///
/// // One row of two documents, of two places and of one.
/// let documents = Documents::new([vec![2, 1]])?;
/// let x = Tensor::new(&[[[1f32], [2.], [3.]]], &Device::Cpu)?;
/// let y = documents.scope(|| attention(&x, &x, &x, &AttentionConfig::new(1, AttentionMask::Causal)))?;
/// // The first of each sees itself alone.
/// let y = y.flatten_all()?.to_vec1::<f32>()?;
/// assert_eq!((y[0], y[2]), (1.0, 3.0));
/// assert_eq!(documents.positions(0..3), [0, 1, 0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents(Arc<[Vec<u32>]>);

impl Documents {
    /// Documents of these lengths, in the order of each row.
    ///
    /// # Errors
    /// [`Error::UnfitDocuments`] for a length of 0, or a row of 2^32 places or more.
    pub fn new(rows: impl IntoIterator<Item = Vec<u32>>) -> Result<Self> {
        let rows: Arc<[Vec<u32>]> = rows.into_iter().collect();
        for (at, row) in rows.iter().enumerate() {
            if row.contains(&0) || row.iter().try_fold(0u32, |sum, len| sum.checked_add(*len)).is_none() {
                let problem =
                    format!("row {at} has the lengths {row:?}; give 1 or more each, below 2^32 in all");
                return Err(Error::UnfitDocuments { operation: "a row", problem });
            }
        }
        Ok(Self(rows))
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.0.len()
    }

    /// The lengths of the documents of each row.
    pub fn lengths(&self) -> impl Iterator<Item = &[u32]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// Number of places of the longest document.
    pub fn longest(&self) -> usize {
        self.0.iter().flatten().max().map_or(0, |len| *len as usize)
    }

    /// Number of places of a row that documents use.
    pub(crate) fn used(&self, row: usize) -> u32 {
        self.0[row].iter().sum()
    }

    /// The documents of a range of the rows.
    ///
    /// # Panics
    /// If the range exceeds the rows.
    #[must_use]
    pub fn part(&self, rows: Range<usize>) -> Self {
        Self(self.0[rows].into())
    }

    /// The position of each of a range of places in its document, row by row.
    pub fn positions(&self, places: Range<usize>) -> Vec<u32> {
        self.bounds(places.clone()).zip(places.cycle()).map(|(own, place)| place as u32 - own.start).collect()
    }

    /// The position of each of these places, which ascend, in its document, row by row. `rows` must be the number of rows.
    pub(super) fn positions_of(
        &self,
        operation: &'static str,
        rows: usize,
        places: &[u32],
    ) -> Result<Vec<u32>> {
        let end = places.last().map_or(0, |last| *last as usize + 1);
        if self.rows() != rows {
            let problem = format!("{rows} rows, documents of {}: give as many", self.rows());
            return Err(Error::UnfitDocuments { operation, problem });
        }
        let of_rows = self.positions(0..end);
        let rows = of_rows.chunks(end.max(1));
        Ok(rows.flat_map(|row| places.iter().map(|place| row[*place as usize])).collect())
    }

    /// For each of a range of places, row by row, the places of its document.
    fn bounds(&self, places: Range<usize>) -> impl Iterator<Item = Range<u32>> {
        self.0.iter().flat_map(move |row| {
            let ends = row.iter().scan(0, |end, len| {
                *end += len;
                Some(*end - len..*end)
            });
            let used: u32 = row.iter().sum();
            let documents = ends.flat_map(|document| repeat_n(document.clone(), document.len()));
            documents.chain((used..).map(|place| place..place + 1)).skip(places.start).take(places.len())
        })
    }

    /// As [`bounds`](Self::bounds), of all places of `rows` rows of `len` places.
    pub(crate) fn of_rows(
        &self,
        operation: &'static str,
        [rows, len]: [usize; 2],
    ) -> Result<Vec<Range<u32>>> {
        let unfit = |problem| Err(Error::UnfitDocuments { operation, problem });
        if self.rows() != rows {
            return unfit(format!("{rows} rows, documents of {}: give as many", self.rows()));
        }
        let used = |row: &Vec<u32>| row.iter().map(|len| *len as usize).sum::<usize>();
        if let Some((at, row)) = self.0.iter().enumerate().find(|(_, row)| used(row) > len) {
            return unfit(format!("the documents of row {at} take {} places, the row has {len}", used(row)));
        }
        Ok(self.bounds(0..len).collect())
    }

    /// Runs a forward pass of these rows, on this thread. Recomputation in backward uses the same documents. A scope in which
    /// nothing asked for documents is reported, once per process.
    pub fn scope<T>(&self, forward: impl FnOnce() -> T) -> T {
        let before = Self::asked();
        let result = RowContext { documents: Some(self.clone()), ..RowContext::current() }.scope(forward);
        if Self::asked() == before && !REPORTED.swap(true, Ordering::Relaxed) {
            warn(
                "Documents had no effect: no attention asked for them, so the documents of a row see each other. candle's own operations \
                 do not know them: use ops::attention or ops::SelfAttention, or ask Documents::current() and mask",
            );
        }
        result
    }

    /// The documents of this thread's innermost scope, or `None` outside of one. Call it from operations in which the places of
    /// a row see each other: a scope in which none asks is reported.
    pub fn current() -> Option<Self> {
        let documents = RowContext::current().documents;
        ASKED.set(ASKED.get() + u64::from(documents.is_some()));
        documents
    }

    /// How often operations on this thread have asked for the documents of a scope, so far.
    pub fn asked() -> u64 {
        ASKED.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_begin_anew_and_unused_places_are_alone() -> Result<()> {
        let documents = Documents::new([vec![2, 3], vec![], vec![7]])?;
        assert_eq!(documents.positions(1..7), [1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(documents.part(0..1).of_rows("x", [1, 6])?, [0..2, 0..2, 2..5, 2..5, 2..5, 5..6]);
        assert_eq!((documents.longest(), documents.part(1..2).longest()), (7, 0));
        for (sizes, said) in [([2, 7], "give as many"), ([3, 6], "row 2 take 7 places, the row has 6")] {
            let error = documents.of_rows("x", sizes).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert!(Documents::new([vec![1, 0]]).is_err() && Documents::new([vec![u32::MAX, 1]]).is_err());
        Ok(())
    }
}
