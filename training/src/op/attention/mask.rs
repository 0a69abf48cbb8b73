//! Which keys a query sees.

use std::ops::Range;

/// Which keys a query sees, by their positions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum AttentionMask {
    /// All.
    #[default]
    Full,
    /// Its own position and those before it: what a model that predicts the next token must keep to.
    Causal,
    /// Of those of [`Causal`](Self::Causal) the last so many, its own among them (Mistral's `sliding_window`).
    SlidingWindow(usize),
    /// Those after it. The last one, which has none, looks at all alike, and nothing is learnt of its scores.
    AntiCausal,
}

impl AttentionMask {
    /// The keys that query `at` of `queries` sees; the last query stands at the last key.
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

    /// The keys that any of some queries sees; all of them where one sees none, for that one takes of all alike.
    pub(super) fn union(self, rows: Range<usize>, queries: usize, keys: usize) -> Range<usize> {
        let ends = [rows.start, rows.end.saturating_sub(1)].map(|at| self.range(at, queries, keys));
        if ends.iter().any(Range::is_empty) {
            return 0..keys;
        }
        ends[0].start..ends[1].end
    }
}
