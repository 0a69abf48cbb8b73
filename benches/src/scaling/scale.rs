//! Speed-up and efficiency, computed from measured runs.

use super::{Kind, Run};

/// Kind of scaling: what stays constant as ranks are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// The rows of each rank.
    Weak,
    /// The rows of all ranks together.
    Strong,
}

/// A point of a scaling curve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point<'a> {
    /// The run.
    pub run: &'a Run,
    /// Rows per second, relative to one rank.
    pub speedup: f64,
    /// Speed-up divided by the number of ranks.
    pub efficiency: f64,
}

/// Returns a strategy's runs by ascending number of ranks, relative to its run on one rank.
pub fn points(runs: &[Run], strategy: Kind, scale: Scale) -> Vec<Point<'_>> {
    let own = || runs.iter().filter(|run| run.case.strategy == strategy);
    let rows = |batch_size: fn(&Run) -> usize, least: bool| {
        let rows = own().map(batch_size);
        if least { rows.min() } else { rows.max() }
    };
    let (each, all) = (rows(|run| run.case.batch_size, true), rows(|run| run.case.batch_size, false));
    let (Some(each), Some(all)) = (each, all) else { return Vec::new() };
    let belongs = |run: &&Run| match scale {
        Scale::Weak => run.case.batch_size == each * run.case.ranks,
        Scale::Strong => run.case.batch_size == all,
    };
    let Some(alone) = own().filter(belongs).find(|run| run.case.ranks == 1) else { return Vec::new() };
    let mut points: Vec<Point<'_>> = own()
        .filter(belongs)
        .map(|run| {
            let speedup = run.rows_per_s / alone.rows_per_s;
            Point { run, speedup, efficiency: speedup / run.case.ranks as f64 }
        })
        .collect();
    points.sort_by_key(|point| point.run.case.ranks);
    points
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaling::Case;

    fn run(ranks: usize, batch_size: usize, step_s: f64) -> Run {
        let case = Case { strategy: Kind::Ddp, ranks, batch_size };
        let rows_per_s = batch_size as f64 / step_s;
        Run { case, rounds_s: vec![step_s], step_s, rows_per_s, by_rank: Vec::new() }
    }

    #[test]
    fn each_kind_of_scaling_has_its_own_runs() {
        let runs = [run(1, 8, 1.0), run(1, 32, 4.0), run(2, 16, 1.25), run(2, 32, 2.5), run(4, 32, 2.0)];
        let of = |scale| -> Vec<(usize, f64, f64)> {
            let points = points(&runs, Kind::Ddp, scale);
            points.iter().map(|point| (point.run.case.ranks, point.speedup, point.efficiency)).collect()
        };
        assert_eq!(of(Scale::Weak), [(1, 1.0, 1.0), (2, 1.6, 0.8), (4, 2.0, 0.5)]);
        assert_eq!(of(Scale::Strong), [(1, 1.0, 1.0), (2, 1.6, 0.8), (4, 2.0, 0.5)]);
        assert!(points(&runs, Kind::Fsdp, Scale::Weak).is_empty());
        assert!(points(&runs[2..], Kind::Ddp, Scale::Weak).is_empty());
    }
}
