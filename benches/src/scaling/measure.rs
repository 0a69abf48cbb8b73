//! Measuring all cases, in rounds.

use cli::console::note;
use cli::error::Result;
use serde::{Deserialize, Serialize};

use super::{Case, Options};
use crate::Ranks;
use crate::workload::{Figures, RankFigures};

/// Measurements of a [`Case`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The case.
    #[serde(flatten)]
    pub case: Case,
    /// Seconds per step, in each round.
    pub rounds_s: Vec<f64>,
    /// Seconds per step, in the median round.
    pub step_s: f64,
    /// Rows of tokens per second.
    pub rows_per_s: f64,
    /// Figures of each rank, in the median round.
    pub by_rank: Vec<RankFigures>,
}

impl Run {
    fn of(case: Case, mut rounds: Vec<Figures>) -> Self {
        let rounds_s = rounds.iter().map(|round| round.step_s).collect();
        rounds.sort_by(|one, other| one.step_s.total_cmp(&other.step_s));
        let median = rounds.swap_remove((rounds.len() - 1) / 2);
        let rows_per_s = case.batch_size as f64 / median.step_s;
        Self { case, rounds_s, step_s: median.step_s, rows_per_s, by_rank: median.ranks }
    }

    /// Returns the mean of a figure over ranks.
    pub fn mean(&self, of: impl Fn(&RankFigures) -> f64) -> f64 {
        self.by_rank.iter().map(of).sum::<f64>() / self.by_rank.len().max(1) as f64
    }

    /// Returns the maximum of a figure over ranks.
    pub fn most(&self, of: impl Fn(&RankFigures) -> f64) -> f64 {
        self.by_rank.iter().map(of).fold(0.0, f64::max)
    }
}

/// Measures all cases. Each round runs all of them in turn, so that other load on the machine affects all alike.
pub(super) fn all(options: &Options) -> Result<Vec<Run>> {
    let cases = Case::all(options);
    let mut rounds: Vec<Vec<Figures>> = vec![Vec::new(); cases.len()];
    for round in 1..=options.rounds {
        for (case, figures) in cases.iter().zip(&mut rounds) {
            let ranks = Ranks { threads: options.threads, ..Ranks::new(case.ranks) };
            let measured = ranks.train(&case.training(options))?;
            let (step, name) = (measured.step_s * 1e3, case.strategy.name());
            let Case { ranks, batch_size, .. } = case;
            note(format_args!(
                "round {round} of {}: {name}, ranks {ranks}, rows {batch_size}: {step:.1} ms a step",
                options.rounds
            ));
            figures.push(measured);
        }
    }
    Ok(cases.into_iter().zip(rounds).map(|(case, rounds)| Run::of(case, rounds)).collect())
}
