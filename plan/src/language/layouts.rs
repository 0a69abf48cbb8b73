//! Enumeration and comparison of all layouts for a number of ranks; impossible layouts have a reason.

use girandole::Layout;
use serde::Serialize;

use super::{LayoutCost, Subject, Training};
use crate::{Error, Result};

/// Layouts that are not possible, for the same reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RuledOut {
    /// The layouts.
    pub meshes: Vec<String>,
    /// Why they are not possible.
    pub reason: String,
}

/// Comparison of layouts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayoutComparison {
    /// Possible layouts, in ascending order of the memory of their largest rank.
    pub costs: Vec<LayoutCost>,
    /// Layouts that are not possible.
    pub ruled_out: Vec<RuledOut>,
}

/// Returns all combinations of `pp`, `dp`, `shard` and `tp` whose product is `ranks`.
pub fn layouts(ranks: usize) -> Vec<Layout> {
    let divisors = |of: usize| (1..=of).filter(move |size| of.is_multiple_of(*size));
    let mut all = Vec::new();
    for pp in divisors(ranks) {
        for tp in divisors(ranks / pp) {
            for shard in divisors(ranks / pp / tp) {
                all.push(Layout { pp, dp: ranks / pp / tp / shard, shard, cp: 1, tp });
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
            match self.estimate(training, layout) {
                Ok(cost) => compared.costs.push(cost),
                Err(Error::Layout { reason }) => compared.rule_out(layout, reason),
                Err(Error::Pipeline(error)) => compared.rule_out(layout, error.to_string()),
                Err(error) => return Err(error),
            }
        }
        compared.costs.sort_by(|a, b| a.most().total().total_cmp(&b.most().total()));
        Ok(compared)
    }
}

impl LayoutComparison {
    fn rule_out(&mut self, layout: &Layout, reason: String) {
        let mesh = layout.to_string();
        match self.ruled_out.iter_mut().find(|known| known.reason == reason) {
            Some(known) => known.meshes.push(mesh),
            None => self.ruled_out.push(RuledOut { meshes: vec![mesh], reason }),
        }
    }
}
