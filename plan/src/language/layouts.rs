//! Enumeration and comparison of all layouts for a number of ranks; impossible layouts have a reason.

use girandole::Layout;

use super::{LayoutCost, Subject, Training};
use crate::compare::RuledOut;
use crate::{Error, Result};

/// Comparison of layouts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayoutComparison {
    /// Possible layouts, in ascending order of the memory of their largest rank.
    pub costs: Vec<LayoutCost>,
    /// Layouts that are not possible.
    pub ruled_out: Vec<RuledOut>,
}

/// Tokens of a row from which on layouts that divide rows are compared.
const LONG: usize = 8192;

/// Returns all combinations of `pp`, `dp`, `shard` and `tp`, for rows of 8,192 tokens or more also of `cp`, for a model with so many
/// experts also of `ep`, whose product is `ranks`.
pub fn layouts(ranks: usize, length: usize, experts: usize) -> Vec<Layout> {
    let divisors = |of: usize| (1..=of).filter(move |size| of.is_multiple_of(*size));
    let mut all = Vec::new();
    for pp in divisors(ranks) {
        for tp in divisors(ranks / pp) {
            for shard in divisors(ranks / pp / tp) {
                let left = ranks / pp / tp / shard;
                let cps = divisors(left).take_while(|cp| *cp == 1 || length >= LONG);
                for cp in cps {
                    let eps = divisors(left / cp).take_while(|ep| *ep == 1 || *ep <= experts);
                    all.extend(eps.map(|ep| Layout { far: 1, pp, dp: left / cp / ep, shard, cp, ep, tp }));
                }
            }
        }
    }
    all
}

impl Subject {
    /// Estimates the cost of each layout.
    ///
    /// # Errors
    /// Errors other than [`Error::Layout`] and [`Error::Pipeline`], which rule a layout out.
    pub fn compare(&self, training: &Training, layouts: &[Layout]) -> Result<LayoutComparison> {
        let mut compared = LayoutComparison::default();
        for layout in layouts {
            let reason = match self.estimate(training, layout) {
                Ok(cost) => {
                    compared.costs.push(cost);
                    continue;
                }
                Err(Error::Layout { reason }) => reason,
                Err(Error::Pipeline(error)) => error.to_string(),
                Err(error) => return Err(error),
            };
            RuledOut::add(&mut compared.ruled_out, layout.to_string(), reason);
        }
        compared.costs.sort_by(|a, b| a.most().total().total_cmp(&b.most().total()));
        Ok(compared)
    }
}
