//! What routers record of their tokens.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};

use super::RowContext;

/// What a router has recorded of a micro-batch.
#[derive(Clone, PartialEq)]
pub(super) struct Record {
    pub(super) router: Arc<str>,
    pub(super) experts: usize,
    pub(super) per_token: usize,
    /// Number of tokens of each row.
    pub(super) tokens: Vec<f64>,
    /// For each row and expert, the number of its tokens, and the sum of its probabilities.
    pub(super) counts: Vec<f64>,
    pub(super) probabilities: Vec<f64>,
}

/// The tokens that a router has routed.
pub(crate) struct Routed<'a> {
    pub(crate) router: &'a Arc<str>,
    /// Of each token and expert, `(tokens, experts)`.
    pub(crate) probabilities: &'a Tensor,
    pub(crate) experts: &'a [u32],
    pub(crate) per_token: usize,
    /// Number of rows of the batch.
    pub(crate) rows: usize,
    /// Of each token, whether it is one of a document; `None` if all are.
    pub(crate) used: Option<Arc<[bool]>>,
}

impl<'a> Routed<'a> {
    /// Finds the places that are used.
    pub(crate) fn new(
        context: &RowContext,
        router: &'a Arc<str>,
        (probabilities, rows): (&'a Tensor, usize),
        (experts, per_token): (&'a [u32], usize),
    ) -> Result<Self> {
        let len = experts.len() / per_token / rows.max(1);
        let used = match &context.documents {
            None => None,
            Some(documents) if documents.rows() != rows => {
                bail!("{router}: {rows} rows, documents of {}: give as many", documents.rows())
            }
            Some(documents) => {
                let places: Vec<u32> = match &context.divided {
                    Some(divided) => divided.places().to_vec(),
                    None => (0..len as u32).collect(),
                };
                let of_row = |row: usize| {
                    let end = documents.used(row);
                    places.iter().map(move |place| *place < end)
                };
                let used: Arc<[bool]> = (0..rows).flat_map(of_row).collect();
                if used.len() != experts.len() / per_token {
                    bail!(
                        "{router}: {} tokens, this rank has {} places",
                        experts.len() / per_token,
                        used.len()
                    )
                }
                Some(used)
            }
        };
        Ok(Self { router, probabilities, experts, per_token, rows, used })
    }

    pub(super) fn dims(&self) -> [usize; 2] {
        [self.rows, self.experts.len() / self.per_token]
    }

    pub(super) fn record(&self) -> Result<Record> {
        let experts = self.probabilities.dim(1)?;
        let [rows, all] = self.dims();
        let len = all / rows.max(1);
        let mut record = Record {
            router: self.router.clone(),
            experts,
            per_token: self.per_token,
            tokens: vec![0.0; rows],
            counts: vec![0.0; rows * experts],
            probabilities: vec![0.0; rows * experts],
        };
        let probabilities = self.probabilities.detach().to_dtype(DType::F64)?.to_vec2::<f64>()?;
        for (token, (probabilities, chosen)) in
            probabilities.iter().zip(self.experts.chunks(self.per_token)).enumerate()
        {
            if self.used.as_ref().is_some_and(|used| !used[token]) {
                continue;
            }
            let row = token / len;
            record.tokens[row] += 1.0;
            add(&mut record.probabilities[row * experts..][..experts], probabilities);
            chosen.iter().for_each(|expert| record.counts[row * experts + *expert as usize] += 1.0);
        }
        Ok(record)
    }
}

pub(super) fn add(sums: &mut [f64], numbers: &[f64]) {
    sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
}
