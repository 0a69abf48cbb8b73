//! Rows of whole documents of a token file.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;

use super::super::TokenFile;
use super::TooLong;
use super::fit::{Part, Window};
use crate::Result;

/// Number of documents that are packed together.
const WINDOW: u64 = 4096;
/// Number of packed windows that are kept: up to 10 MB.
const KEPT: usize = 64;

/// Rows of a file's documents. They are packed window by window, again and again as their rows are read: only the number of rows
/// of each window is kept, 8 bytes for 4,096 documents.
pub(in super::super) struct Whole {
    len: u64,
    too_long: TooLong,
    /// Number of rows up to the end of each window.
    ends: Vec<u64>,
    /// The windows used last, the latest at the end.
    kept: Mutex<Vec<(usize, Arc<Window>)>>,
    pub(in super::super) cut: u64,
    pub(in super::super) dropped: u64,
    /// Number of unused places in all rows.
    pub(in super::super) padding: u64,
}

impl Whole {
    /// Packs all documents once, to number their rows.
    pub(in super::super) fn new(file: &TokenFile, len: u64, too_long: TooLong) -> Result<Self> {
        let windows = file.documents().div_ceil(WINDOW);
        let counted = (0..windows).into_par_iter().map(|window| {
            let bounds = bounds(file, window)?;
            if too_long == TooLong::Error {
                refuse_too_long(file, &bounds, window, len)?;
            }
            let Window { rows, cut, dropped, tokens, .. } = Window::pack(&bounds, len, too_long);
            Ok([rows, cut, dropped, tokens])
        });
        // In the order of the file, so that every rank names the same document.
        let counted: Vec<Result<[u64; 4]>> = counted.collect();
        let (mut ends, mut sums) = (Vec::with_capacity(counted.len()), [0; 4]);
        for counted in counted {
            for (sum, counted) in sums.iter_mut().zip(counted?) {
                *sum += counted;
            }
            ends.push(sums[0]);
        }
        let [rows, cut, dropped, tokens] = sums;
        let padding = rows * len - tokens;
        Ok(Self { len, too_long, ends, kept: Mutex::default(), cut, dropped, padding })
    }

    pub(in super::super) fn too_long(&self) -> TooLong {
        self.too_long
    }

    /// Returns the number of rows.
    pub(in super::super) fn rows(&self) -> u64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Returns what is in a row.
    pub(in super::super) fn row(&self, file: &TokenFile, row: u64) -> Result<Vec<Part>> {
        let window = self.ends.partition_point(|end| *end <= row);
        let before = window.checked_sub(1).map_or(0, |before| self.ends[before]);
        let parts = self.window(file, window)?.row(row - before, self.len);
        parts.ok_or_else(|| file.refuse("its documents have changed since it was opened".into()))
    }

    fn window(&self, file: &TokenFile, window: usize) -> Result<Arc<Window>> {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = kept();
        if let Some(place) = found.iter().position(|(kept, _)| *kept == window) {
            let last = found.remove(place);
            found.push(last);
            return Ok(found[found.len() - 1].1.clone());
        }
        drop(found);
        let packed = Arc::new(Window::pack(&bounds(file, window as u64)?, self.len, self.too_long));
        let mut kept = kept();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((window, packed.clone()));
        Ok(packed)
    }
}

/// Returns where the documents of a window begin, and where the last one ends.
fn bounds(file: &TokenFile, window: u64) -> Result<Vec<u64>> {
    file.bounds(window * WINDOW..((window + 1) * WINDOW).min(file.documents()))
}

fn refuse_too_long(file: &TokenFile, bounds: &[u64], window: u64, len: u64) -> Result<()> {
    let long = bounds.windows(2).position(|document| document[1] - document[0] > len);
    long.map_or(Ok(()), |place| {
        let (number, tokens) = (window * WINDOW + place as u64 + 1, bounds[place + 1] - bounds[place]);
        Err(file.refuse(format!(
            "document {number} has {tokens} tokens, and rows have {len}: give longer rows, or have such documents truncated or \
             dropped (--too-long)"
        )))
    })
}

impl fmt::Debug for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Whole({} rows)", self.rows())
    }
}
