//! Attention masks.

use std::ops::Range;

/// Which keys a query sees, by position.
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
    /// get no gradient.
    AntiCausal,
}

impl AttentionMask {
    /// Range of keys that query `at` of `queries` sees; the last query is at the position of the last key.
    pub(super) fn range(self, at: usize, queries: usize, keys: usize) -> Range<usize> {
        // Without a mask there may be more queries than keys.
        let own = (at + keys).saturating_sub(queries);
        match self {
            Self::Full => 0..keys,
            Self::Causal => 0..own + 1,
            Self::SlidingWindow(window) => (own + 1).saturating_sub(window)..own + 1,
            Self::AntiCausal => own + 1..keys,
        }
    }

    /// Range of keys that any of the queries `rows` sees; all keys if one of them sees none, since that one weighs
    /// all equally.
    pub(super) fn union(self, rows: Range<usize>, queries: usize, keys: usize) -> Range<usize> {
        let ends = [rows.start, rows.end.saturating_sub(1)].map(|at| self.range(at, queries, keys));
        if ends.iter().any(Range::is_empty) {
            return 0..keys;
        }
        ends[0].start..ends[1].end
    }
}
