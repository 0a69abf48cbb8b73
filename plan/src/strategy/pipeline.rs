//! Cost of a GPipe pipeline: all micro-batches of a step are kept until backward begins.

use std::ops::Range;

use pipeline::Split;

use crate::compare::Memory;
use crate::error::Result;
use crate::model::{Model, Unit};

use super::{Estimate, Setting, Strategy, bytes_of};

pub(super) fn estimate(model: &Model, setting: &Setting) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let stages: Vec<Stage> =
        stages(&model.units, ranks).into_iter().map(|units| Stage::of(units, setting)).collect();
    let largest = |of: fn(&Stage) -> u64| stages.iter().map(of).max().unwrap_or(0);
    let rows = batch_size as u64;
    // Each stage keeps its input from the previous stage, and its activations.
    let came = |place: usize| place.checked_sub(1).map_or(0, |before| stages[before].output);
    let kept = |(place, stage): (usize, &Stage)| {
        bytes_of(stage.kept + came(place), rows, element) + stage.kept_apart
    };
    let parameters = (largest(|stage| stage.parameters) * element) as f64;
    let memory = Memory {
        parameters: (largest(|stage| stage.parameters + stage.buffers) * element) as f64,
        buffers: 0.0,
        gradients: parameters,
        optimizer: parameters * setting.optimizer as f64,
        activations: stages.iter().enumerate().map(kept).fold(0.0, f64::max),
    };
    // A stage sends its output forward, and the gradient of its input backward; the first and last stage send only one
    // of them.
    let sends = |place: usize| came(place) + if place + 1 < ranks { stages[place].output } else { 0 };
    let sent = bytes_of((0..stages.len()).map(sends).max().unwrap_or(0), rows, element);
    Estimate { strategy: Strategy::Pipeline, memory, sent }
}

/// Sizes of a stage.
struct Stage {
    parameters: u64,
    buffers: u64,
    /// Activations kept, per sample.
    kept: u64,
    /// Bytes kept in addition, for all samples.
    kept_apart: f64,
    output: u64,
}

impl Stage {
    fn of(units: &[Unit], setting: &Setting) -> Self {
        let sum = |of: fn(&Unit) -> u64| units.iter().map(of).sum();
        let (rows, parts) = (setting.batch_size as u64, setting.parts() as u64);
        let apart = |unit: &Unit| unit.kept_apart(rows, parts, setting.element);
        Self {
            parameters: sum(Unit::parameters),
            buffers: sum(|unit| unit.buffers),
            kept: sum(Unit::kept),
            kept_apart: units.iter().map(apart).sum(),
            output: units.last().map_or(0, |unit| unit.output),
        }
    }
}

/// Returns the units of each stage, split as by `pipeline-transformer --split parameters`.
pub(crate) fn stages(units: &[Unit], ranks: usize) -> Vec<&[Unit]> {
    let costs: Vec<f64> = units.iter().map(|unit| unit.parameters() as f64).collect();
    // Empty if there are more ranks than units: there is no such strategy then.
    let ranges = split(&costs, ranks).unwrap_or_default();
    ranges.into_iter().map(|range| &units[range]).collect()
}

/// Returns the places of the units of each stage, which have about equal costs.
///
/// # Errors
/// More stages than units.
pub(crate) fn split(costs: &[f64], stages: usize) -> Result<Vec<Range<usize>>> {
    // Names are for splits at given units.
    Ok(Split::default().stages(&vec![""; costs.len()], costs, stages)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_about_equal_and_none_is_empty() {
        let units: Vec<Unit> = [5, 1, 1, 1, 1, 5]
            .map(|whole| Unit { whole: vec![whole], ..Unit::default() })
            .into_iter()
            .collect();
        for ranks in 1..=6 {
            let stages = stages(&units, ranks);
            assert_eq!(stages.len(), ranks);
            assert!(stages.iter().all(|stage| !stage.is_empty()));
            assert_eq!(stages.concat(), units);
        }
        let sizes: Vec<usize> = stages(&units, 2).iter().map(|stage| stage.len()).collect();
        assert_eq!(sizes, [3, 3]);
    }
}
