//! Load of experts: a row of a table for each router.

use crate::number::significant;
use crate::{RouterTokens, RunSeries};

/// The load of the experts of one run, in the last step that was logged.
pub(super) struct Load<'a> {
    pub(super) run: &'a str,
    pub(super) step: usize,
    pub(super) rows: Vec<Row<'a>>,
}

/// A row of the table.
pub(super) struct Row<'a> {
    pub(super) router: &'a str,
    pub(super) experts: usize,
    /// The number of the expert that had the most tokens, and its share.
    pub(super) busiest: String,
    pub(super) least: String,
    /// Number of experts that had no token.
    pub(super) unused: usize,
}

/// Returns the loads of all runs that have experts.
pub(super) fn of(runs: &[RunSeries]) -> Vec<Load<'_>> {
    runs.iter().filter_map(load).collect()
}

fn load(run: &RunSeries) -> Option<Load<'_>> {
    let routed = run.experts.as_ref()?;
    Some(Load { run: &run.name, step: routed.step, rows: routed.routers.iter().map(row).collect() })
}

fn row(RouterTokens { router, tokens }: &RouterTokens) -> Row<'_> {
    let all: u64 = tokens.iter().sum();
    let share = |of: Option<(usize, &u64)>| {
        let (expert, tokens) = of.unwrap_or((0, &0));
        format!("{expert} ({} %)", significant(100.0 * *tokens as f64 / all.max(1) as f64, 3))
    };
    Row {
        router,
        experts: tokens.len(),
        // Of several the first.
        busiest: share(tokens.iter().enumerate().rev().max_by_key(|(_, tokens)| **tokens)),
        least: share(tokens.iter().enumerate().min_by_key(|(_, tokens)| **tokens)),
        unused: tokens.iter().filter(|tokens| **tokens == 0).count(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RoutedTokens;

    #[test]
    fn the_first_of_the_busiest_and_of_the_least_busy_are_named() {
        let router = RouterTokens { router: "layer 3".into(), tokens: vec![2, 0, 3, 0, 3] };
        let experts = Some(RoutedTokens { step: 20, routers: vec![router, RouterTokens::default()] });
        let runs = [RunSeries { experts, ..RunSeries::default() }, RunSeries::default()];
        let loads = of(&runs);
        let [Load { step: 20, rows, .. }] = &loads[..] else { panic!("{}", loads.len()) };
        let shown = |row: &Row<'_>| (row.busiest.clone(), row.least.clone(), row.experts, row.unused);
        assert_eq!(shown(&rows[0]), ("2 (37.5 %)".into(), "1 (0 %)".into(), 5, 2));
        assert_eq!((rows[0].router, rows[1].experts), ("layer 3", 0));
    }
}
