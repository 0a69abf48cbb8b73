//! Evaluation results of runs: points in the plot of losses, and rows of a table.

use crate::number::significant;
use crate::{Evaluation, RunSeries};

/// Maximum number of table rows for each run: the first one, and the latest ones.
const MOST_ROWS: usize = 12;

/// A run's evaluations, as they are drawn.
pub(super) struct Evaluated<'a> {
    pub(super) run: &'a RunSeries,
    pub(super) name: String,
    /// Colour number.
    pub(super) colour: usize,
}

impl Evaluated<'_> {
    /// Returns the steps and losses that can be drawn.
    pub(super) fn points(&self) -> impl Iterator<Item = (usize, f64)> {
        let all = self.run.evaluations.iter().map(|evaluation| (evaluation.step, evaluation.loss));
        all.filter(|(_, loss)| loss.is_finite())
    }
}

/// Returns the runs that have evaluations, with colours after those of the runs themselves.
pub(super) fn of<'a>(runs: &[&'a RunSeries]) -> Vec<Evaluated<'a>> {
    let with = runs.iter().filter(|run| run.evaluations.iter().any(|evaluation| evaluation.loss.is_finite()));
    let name = |run: &RunSeries| match runs.len() {
        1 => "evaluation".to_string(),
        _ => format!("{}, evaluation", run.name),
    };
    with.enumerate()
        .map(|(place, run)| Evaluated { run, name: name(run), colour: runs.len() + place })
        .collect()
}

/// A row of the table.
pub(super) struct Row<'a> {
    pub(super) run: &'a str,
    pub(super) step: usize,
    pub(super) loss: String,
    pub(super) perplexity: String,
    pub(super) sample: String,
    pub(super) measures: String,
}

/// Returns the table rows of all runs.
pub(super) fn rows(runs: &[RunSeries]) -> Vec<Row<'_>> {
    runs.iter().flat_map(|run| shown(&run.evaluations).map(|evaluation| row(run, evaluation))).collect()
}

fn shown(all: &[Evaluation]) -> impl Iterator<Item = &Evaluation> {
    let left_out = 1..(all.len() + 1).saturating_sub(MOST_ROWS).max(1);
    all.iter()
        .enumerate()
        .filter(move |(place, _)| !left_out.contains(place))
        .map(|(_, evaluation)| evaluation)
}

fn row<'a>(run: &'a RunSeries, evaluation: &'a Evaluation) -> Row<'a> {
    Row {
        run: &run.name,
        step: evaluation.step,
        loss: significant(evaluation.loss, 4),
        perplexity: significant(evaluation.loss.exp(), 4),
        sample: evaluation.sample.as_deref().map(printable).unwrap_or_default(),
        measures: measures(evaluation),
    }
}

/// Returns what else was measured, in one line.
fn measures(evaluation: &Evaluation) -> String {
    let each =
        evaluation.measures.iter().map(|(name, measure)| format!("{name} {}", significant(*measure, 4)));
    each.collect::<Vec<_>>().join(", ")
}

/// Replaces control characters, which a byte-level model may generate and which are not allowed in HTML.
fn printable(text: &str) -> String {
    let is_shown = |c: char| !c.is_control() || c == '\n' || c == '\t';
    text.chars().map(|c| if is_shown(c) { c } else { char::REPLACEMENT_CHARACTER }).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn control_characters_are_not_shown() {
        assert_eq!(super::printable("a\0b\u{7f}\n\tc"), "a\u{fffd}b\u{fffd}\n\tc");
    }

    use super::*;

    #[test]
    fn of_many_the_first_and_the_latest_are_shown() {
        let all = |count| -> Vec<Evaluation> {
            (1..=count).map(|step| Evaluation { step, ..Evaluation::default() }).collect()
        };
        let steps = |count| shown(&all(count)).map(|evaluation| evaluation.step).collect::<Vec<_>>();
        assert_eq!(steps(0), [0; 0]);
        assert_eq!(steps(MOST_ROWS), (1..=MOST_ROWS).collect::<Vec<_>>());
        assert_eq!(steps(100), [1].into_iter().chain(90..=100).collect::<Vec<_>>());
    }
}
