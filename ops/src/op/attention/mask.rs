//! Attention masks.

use std::ops::Range;

use super::AttentionCall;

/// Which keys a query sees, by position; of packed rows ([`Documents`](crate::Documents)), those of its own document.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum AttentionMask {
    /// All keys.
    #[default]
    Full,
    /// The query's own position and those before it, for next-token prediction.
    Causal,
    /// The last so many of the keys of [`Causal`](Self::Causal), including the query's own (Mistral's
    /// `sliding_window`).
    SlidingWindow(usize),
    /// The positions after the query's own. The last query, which sees none, weighs all keys equally, and its scores
    /// get no gradient. Not for packed rows.
    AntiCausal,
}

impl AttentionMask {
    /// The keys that a query at place `own` sees of its document.
    pub(super) fn seen(self, own: usize, document: Range<usize>) -> Range<usize> {
        match self {
            Self::Full => document,
            Self::Causal => document.start..own + 1,
            Self::SlidingWindow(window) => document.start.max((own + 1).saturating_sub(window))..own + 1,
            Self::AntiCausal => own + 1..document.end,
        }
    }
}

impl AttentionCall {
    /// The places of the document of a place of a row, whose length is `len`.
    pub(super) fn document(&self, batch: usize, place: usize, len: usize) -> Range<usize> {
        match &self.documents {
            None => 0..len,
            Some(documents) => {
                let Range { start, end } = documents[batch * len + place];
                start as usize..end as usize
            }
        }
    }

    /// Range of keys that query `at` of a row of the batch sees; the last query is at the position of the last key.
    pub(super) fn range(&self, batch: usize, at: usize) -> Range<usize> {
        let (queries, keys) = (self.sizes.queries, self.sizes.keys);
        if let Some(part) = &self.part {
            return part.range(batch * queries + at);
        }
        // Without a mask there may be more queries than keys.
        let own = (at + keys).saturating_sub(queries);
        self.mask.seen(own, self.document(batch, own, keys))
    }

    /// Range of keys that any of the queries `rows` sees; all keys if one of them sees none, since that one weighs
    /// all equally.
    pub(super) fn union(&self, batch: usize, rows: Range<usize>) -> Range<usize> {
        if let Some(part) = &self.part {
            let first = batch * self.sizes.queries;
            return part.union(first + rows.start..first + rows.end);
        }
        let ends = [rows.start, rows.end.saturating_sub(1)].map(|at| self.range(batch, at));
        if ends.iter().any(Range::is_empty) {
            return 0..self.sizes.keys;
        }
        ends[0].start..ends[1].end
    }
}
