//! Tokens sorted by expert.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use super::Routes;

/// The pairs of a token and one of its experts, sorted by expert; those of one expert in the order of their tokens.
#[derive(Debug, Clone)]
pub(super) struct Order(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Experts of each token.
    per_token: usize,
    /// For each place in the order, the number of the pair: those of token 0 come first.
    pairs: Vec<usize>,
    /// For each pair, its place in the order.
    places: Vec<usize>,
    groups: Groups,
}

/// Which rows each expert has, where rows are sorted by expert.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    /// For each expert, its first row; at last the number of rows.
    begins: Arc<[usize]>,
}

impl Groups {
    /// Those of experts with so many rows each.
    pub(super) fn of_counts(counts: impl IntoIterator<Item = usize>) -> Self {
        let mut begins = vec![0];
        begins.extend(counts.into_iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        }));
        Self { begins: begins.into() }
    }

    /// The rows of each expert.
    pub(super) fn of_experts(&self) -> impl Iterator<Item = Range<usize>> {
        self.begins.windows(2).map(|bounds| bounds[0]..bounds[1])
    }
}

impl Order {
    pub(super) fn of(routes: &Routes) -> Self {
        let mut counts = vec![0; routes.count()];
        for &expert in routes.experts() {
            counts[expert as usize] += 1;
        }
        let groups = Groups::of_counts(counts);
        let (mut next, pairs) = (groups.begins.to_vec(), routes.experts().len());
        let (mut order, mut places) = (vec![0; pairs], vec![0; pairs]);
        for (pair, &expert) in routes.experts().iter().enumerate() {
            let place = &mut next[expert as usize];
            (order[*place], places[pair]) = (pair, *place);
            *place += 1;
        }
        Self(Arc::new(Inner { per_token: routes.per_token(), pairs: order, places, groups }))
    }

    /// Places of each expert's pairs.
    pub(super) fn groups(&self) -> &Groups {
        &self.0.groups
    }

    pub(super) fn per_token(&self) -> usize {
        self.0.per_token
    }

    /// For each pair, in the order of the tokens, its place.
    pub(super) fn places(&self) -> &[usize] {
        &self.0.places
    }

    /// For each place, the number of its pair.
    pub(super) fn pairs(&self) -> &[usize] {
        &self.0.pairs
    }

    /// For each place, the number of its token.
    pub(super) fn tokens(&self, device: &Device) -> Result<Tensor> {
        let of = |pair: &usize| (pair / self.0.per_token) as u32;
        Tensor::from_iter(self.0.pairs.iter().map(of), device)
    }
}
