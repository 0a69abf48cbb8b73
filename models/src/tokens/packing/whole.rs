//! Rows of whole documents of a token file.

use std::fmt;
use std::sync::{Arc, Mutex};

use rayon::prelude::*;

use super::super::TokenFile;
use super::TooLong;
use super::fit::{Part, Window};
use crate::Result;
use training::internal::lock;

/// Number of documents that are packed together.
const WINDOW: u64 = 4096;
/// Number of packed windows that are kept: up to 10 MB.
const KEPT: usize = 64;

/// Rows of a file's documents. They are packed window by window, again and again as their rows are read: only the number of rows
/// of each window is kept, 8 bytes for 4,096 documents.
pub(in super::super) struct Whole {
    len: u64,
    too_long: TooLong,
    /// Number of documents that stay together: 2 of a pair, else 1.
    group: u64,
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
    pub(in super::super) fn new(file: &TokenFile, len: u64, too_long: TooLong, pairs: bool) -> Result<Self> {
        let (windows, group) = (file.documents().div_ceil(WINDOW), if pairs { 2 } else { 1 });
        if !file.documents().is_multiple_of(group) {
            return Err(file.refuse(format!(
                "it has {} documents, and a pair is two: give a file with the chosen and the rejected answer of each pair",
                file.documents()
            )));
        }
        // A cut pair cannot be compared.
        let too_long = match too_long {
            TooLong::Cut | TooLong::Truncate if pairs => TooLong::Drop,
            _ => too_long,
        };
        let counted = (0..windows).into_par_iter().map(|window| {
            let bounds = bounds(file, window, group)?;
            if too_long == TooLong::Error {
                refuse_too_long(file, &bounds, (window * WINDOW / group, len), unit(group))?;
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
        Ok(Self { len, too_long, group, ends, kept: Mutex::default(), cut, dropped, padding })
    }

    pub(in super::super) fn too_long(&self) -> TooLong {
        self.too_long
    }

    /// What is packed.
    pub(in super::super) fn unit(&self) -> &'static str {
        if self.has_pairs() { "pairs" } else { "documents" }
    }

    /// Number of what is packed.
    pub(in super::super) fn units(&self, file: &TokenFile) -> u64 {
        file.documents() / self.group
    }

    /// Whether pairs stay together.
    pub(in super::super) fn has_pairs(&self) -> bool {
        self.group == 2
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
        let parts =
            parts.ok_or_else(|| file.refuse("its documents have changed since it was opened".into()))?;
        if self.group == 1 {
            return Ok(parts);
        }
        // The second document of each pair begins within it.
        let mut documents = Vec::with_capacity(2 * parts.len());
        for Part { tokens, .. } in parts {
            let middle = file.begins_within(tokens.clone())?.first().copied().unwrap_or(tokens.end);
            for tokens in [tokens.start..middle, middle..tokens.end] {
                documents.push(Part { tokens, goes_on: false });
            }
        }
        Ok(documents)
    }

    fn window(&self, file: &TokenFile, window: usize) -> Result<Arc<Window>> {
        let kept = || lock(&self.kept);
        let mut found = kept();
        if let Some(place) = found.iter().position(|(kept, _)| *kept == window) {
            let last = found.remove(place);
            found.push(last);
            return Ok(found[found.len() - 1].1.clone());
        }
        drop(found);
        let packed =
            Arc::new(Window::pack(&bounds(file, window as u64, self.group)?, self.len, self.too_long));
        let mut kept = kept();
        if kept.len() == KEPT {
            kept.remove(0);
        }
        kept.push((window, packed.clone()));
        Ok(packed)
    }
}

/// Returns where the documents of a window begin, or each `group` of them, and where the last one ends.
fn bounds(file: &TokenFile, window: u64, group: u64) -> Result<Vec<u64>> {
    let all = file.bounds(window * WINDOW..((window + 1) * WINDOW).min(file.documents()))?;
    Ok(all.into_iter().step_by(group as usize).collect())
}

fn unit(group: u64) -> &'static str {
    if group == 2 { "pair" } else { "document" }
}

/// `before` is the number of documents before those of the bounds.
fn refuse_too_long(file: &TokenFile, bounds: &[u64], (before, len): (u64, u64), unit: &str) -> Result<()> {
    let long = bounds.windows(2).position(|document| document[1] - document[0] > len);
    long.map_or(Ok(()), |place| {
        let done = if unit == "pair" { "dropped" } else { "truncated or dropped" };
        let (number, tokens) = (before + place as u64 + 1, bounds[place + 1] - bounds[place]);
        Err(file.refuse(format!(
            "{unit} {number} has {tokens} tokens, and rows have {len}: give longer rows, or have such {unit}s {done} (--too-long)"
        )))
    })
}

impl fmt::Debug for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Whole({} rows)", self.rows())
    }
}
