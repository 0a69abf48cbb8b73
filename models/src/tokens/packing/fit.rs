//! Best fit of a window of documents into rows.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::TooLong;

/// Rows of a window.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The window's rows, in order, each with the number of rows before it.
    entries: Vec<(u64, Entry)>,
    /// Documents and rests of documents, each within a row.
    parts: Vec<Range<u64>>,
    pub(super) rows: u64,
    /// Numbers of documents that were cut, and left out.
    pub(super) cut: u64,
    pub(super) dropped: u64,
    /// Number of tokens in its rows.
    pub(super) tokens: u64,
}

/// A document, or a piece of one, in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Part {
    pub(in super::super) tokens: Range<u64>,
    /// Whether its document goes on behind it, so that the next token is its last one's target.
    pub(in super::super) goes_on: bool,
}

#[derive(Debug)]
enum Entry {
    /// Rows that a document fills, which is longer than one.
    Full(Range<u64>),
    /// A row of these parts.
    Shared(Range<usize>),
}

impl Window {
    /// Packs documents, given by the index of each one's first token, and last that behind the last document: the longest
    /// first, each into the fullest row that has room for it, and of several into the one that has been so for longest.
    /// In a row documents have the file's order, and rows that of their first documents.
    ///
    /// # Source
    /// "Fewer Truncations Improve Language Modeling" (Ding et al., 2024), section 3.2.
    pub(super) fn pack(bounds: &[u64], len: u64, too_long: TooLong) -> Self {
        let mut window = Self::default();
        // Of each document, what shares a row, and what fills rows alone.
        let mut shared: Vec<Range<u64>> = Vec::with_capacity(bounds.len());
        let mut ordered: Vec<(u64, u64, Entry)> = Vec::new();
        for document in bounds.windows(2) {
            let (begin, mut end) = (document[0], document[1]);
            let full = match end - begin > len {
                true if too_long == TooLong::Drop => {
                    window.dropped += 1;
                    continue;
                }
                true if too_long == TooLong::Truncate => {
                    window.cut += 1;
                    end = begin + len;
                    0
                }
                true => {
                    window.cut += 1;
                    (end - begin) / len
                }
                false => 0,
            };
            window.tokens += end - begin;
            if full > 0 {
                ordered.push((begin, full, Entry::Full(begin..end)));
            }
            let rest = begin + full * len..end;
            shared.extend(Some(rest).filter(|rest| !rest.is_empty()));
        }
        let rows = best_fit(&shared, len);
        let mut places: Vec<usize> = (0..shared.len()).collect();
        places.sort_by_key(|place| rows[*place]);
        for row in places.chunk_by(|a, b| rows[*a] == rows[*b]) {
            let first = window.parts.len();
            window.parts.extend(row.iter().map(|place| shared[*place].clone()));
            ordered.push((window.parts[first].start, 1, Entry::Shared(first..window.parts.len())));
        }
        ordered.sort_by_key(|(begin, ..)| *begin);
        for (_, rows, entry) in ordered {
            window.entries.push((window.rows, entry));
            window.rows += rows;
        }
        window
    }

    /// Returns what is in a row; `None` if there is no such row.
    pub(super) fn row(&self, row: u64, len: u64) -> Option<Vec<Part>> {
        let after = self.entries.partition_point(|(before, _)| *before <= row);
        let (before, entry) = self.entries.get(after.checked_sub(1)?).filter(|_| row < self.rows)?;
        Some(match entry {
            Entry::Full(document) => {
                let begin = document.start + (row - before) * len;
                vec![Part { tokens: begin..begin + len, goes_on: begin + len < document.end }]
            }
            Entry::Shared(parts) => {
                let part = |tokens: &Range<u64>| Part { tokens: tokens.clone(), goes_on: false };
                self.parts[parts.clone()].iter().map(part).collect()
            }
        })
    }
}

/// No row.
const NONE: u32 = u32::MAX;

/// Puts parts into rows, none longer than `len`; returns the row of each part.
fn best_fit(parts: &[Range<u64>], len: u64) -> Vec<u32> {
    let size = |place: u32| parts[place as usize].end - parts[place as usize].start;
    let mut order: Vec<u32> = (0..parts.len() as u32).collect();
    order.sort_by_key(|place| Reverse(size(*place)));
    let mut rows = vec![NONE; parts.len()];
    // Rows with room, by how much: the first and the last of a queue, and of each row the next one in its queue.
    let mut open: BTreeMap<u64, (u32, u32)> = BTreeMap::new();
    let mut next: Vec<u32> = Vec::new();
    for place in order {
        let size = size(place);
        let fitting = open.range_mut(size..).next().map(|(room, queue)| (*room, queue));
        let (room, row) = match fitting {
            Some((room, queue)) => {
                let (row, last) = *queue;
                queue.0 = next[row as usize];
                if row == last {
                    open.remove(&room);
                }
                (room, row)
            }
            None => {
                next.push(NONE);
                (len, next.len() as u32 - 1)
            }
        };
        rows[place as usize] = row;
        if room > size {
            let (_, last) = open
                .entry(room - size)
                .and_modify(|(_, last)| next[*last as usize] = row)
                .or_insert((row, row));
            *last = row;
        }
    }
    rows
}
