//! Loss curves: the losses of all runs by step in one plot.

use plotters::element::{Circle, Polygon};
use plotters::prelude::Color;
use plotters::series::LineSeries;

use crate::axis::Axis;
use crate::chart::{COLOURS, Chart, Drawn, Frame, Layout, colour, draw_full_width, px};
use crate::evaluations::{self, Evaluated};
use crate::number::significant;
use crate::thin::{Bin, downsample};
use crate::{Result, RunSeries};

const TITLE: &str = "Loss";
/// Enough for the width of the page; more would only draw noise.
const MOST_POINTS: usize = 400;

/// One run's curve, ready to draw.
struct Curve<'a> {
    run: &'a RunSeries,
    pieces: Vec<Vec<Bin>>,
    /// Number of losses in one unit of the x axis.
    per_unit: f64,
}

impl Curve<'_> {
    fn bins(&self) -> impl Iterator<Item = &Bin> {
        self.pieces.iter().flatten()
    }

    /// Returns the x coordinate of a bin. Steps count from 1, as in printed output, so that a step and an evaluation
    /// after it have the same x coordinate. A mean over several steps is drawn in the middle of them.
    fn x(&self, bin: &Bin) -> f64 {
        let middle = (1. + self.run.losses_per(1)) / 2.;
        (self.run.before() + bin.step + middle) / self.per_unit
    }

    /// Returns the x coordinates of its beginning and end.
    fn ends(&self) -> (f64, f64) {
        let (before, len) = (self.run.before(), self.run.losses.len() as f64);
        (before / self.per_unit, (before + len) / self.per_unit)
    }
}

/// The evaluations of a run, ready to draw.
struct Dots {
    name: String,
    colour: usize,
    points: Vec<(f64, f64)>,
}

fn dots(evaluated: &Evaluated<'_>, by_epoch: bool) -> Dots {
    let steps = if by_epoch { evaluated.run.steps_per_epoch } else { 1 };
    let points = evaluated.points().map(|(step, loss)| (step as f64 / steps as f64, loss));
    let (name, colour) = (evaluated.name.clone(), evaluated.colour % COLOURS.len());
    Dots { name, colour, points: points.collect() }
}

/// Draws the plot; `None` if no loss is finite.
pub(super) fn losses(runs: &[RunSeries]) -> Result<Option<Chart>> {
    let runs: Vec<_> = runs.iter().filter(|run| !run.losses.is_empty()).collect();
    let by_epoch = runs.iter().all(|run| run.steps_per_epoch > 0);
    let curves: Vec<_> = runs
        .iter()
        .map(|run| {
            let per_unit = run.losses_per(if by_epoch { run.steps_per_epoch } else { 1 });
            Curve { run, pieces: downsample(&run.losses, MOST_POINTS), per_unit }
        })
        .collect();
    let bins = || curves.iter().flat_map(Curve::bins);
    if bins().next().is_none() {
        return Ok(None);
    }
    let dots: Vec<Dots> = evaluations::of(&runs).iter().map(|evaluated| dots(evaluated, by_epoch)).collect();
    let points = || dots.iter().flat_map(|dots| &dots.points);
    let (lows, highs) = (points().map(|point| point.1), points().map(|point| point.1));
    let low = bins().map(|bin| bin.low).chain(lows).fold(f64::INFINITY, f64::min);
    let high = bins().map(|bin| bin.high).chain(highs).fold(f64::NEG_INFINITY, f64::max);
    let (begins, ends) = (points().map(|point| point.0), points().map(|point| point.0));
    let begin = curves.iter().map(|curve| curve.ends().0).chain(begins).fold(f64::INFINITY, f64::min);
    let end = curves.iter().map(|curve| curve.ends().1).chain(ends).fold(0., f64::max);
    let layout = |size| Layout {
        size,
        x: Axis::linear(begin, end),
        y: if low > 0. { Axis::log(low / 1.08, high * 1.08) } else { padded(low, high) },
        x_name: if by_epoch { "epoch" } else { "step" },
        y_name: if low > 0. { "loss (log scale)" } else { "loss" },
        x_grid: true,
    };
    let svg = draw_full_width(TITLE, 360, layout, |frame| paint(frame, &curves, &dots))?;
    let legend =
        curves.iter().enumerate().map(|(number, curve)| (number % COLOURS.len(), curve.run.name.clone()));
    Ok(Some(Chart {
        title: TITLE.to_string(),
        summary: summary(&curves, &dots),
        legend: legend.chain(dots.iter().map(|dots| (dots.colour, dots.name.clone()))).collect(),
        note: note(&curves),
        svg,
    }))
}

fn padded(low: f64, high: f64) -> Axis {
    let margin = (high - low) * 0.05;
    Axis::linear(low - margin, high + margin)
}

fn paint(frame: &mut Frame<'_, '_>, curves: &[Curve<'_>], dots: &[Dots]) -> Drawn {
    for (number, curve) in curves.iter().enumerate() {
        for piece in &curve.pieces {
            if piece.iter().any(|bin| bin.low < bin.high) {
                let above = piece.iter().map(|bin| (curve.x(bin), bin.high));
                let below = piece.iter().rev().map(|bin| (curve.x(bin), bin.low));
                let band = above.chain(below).collect::<Vec<_>>();
                frame.draw_series([Polygon::new(band, colour(number).mix(0.22))])?;
            }
        }
    }
    for (number, curve) in curves.iter().enumerate() {
        for piece in &curve.pieces {
            let points = || piece.iter().map(|bin| (curve.x(bin), bin.mean));
            if piece.len() == 1 {
                frame
                    .draw_series(points().map(|point| Circle::new(point, px(3), colour(number).filled())))?;
            } else {
                // The first line is wider than the others, so that two equal curves both remain visible.
                let width = if number == 0 { px(3) } else { px(3) / 2 };
                frame.draw_series(LineSeries::new(points(), colour(number).stroke_width(width as u32)))?;
            }
        }
    }
    for Dots { colour: number, points, .. } in dots {
        let ink = colour(*number);
        frame.draw_series(LineSeries::new(points.iter().copied(), ink.stroke_width(px(2) as u32)))?;
        frame.draw_series(points.iter().map(|point| Circle::new(*point, px(4), ink.filled())))?;
    }
    Ok(())
}

fn summary(curves: &[Curve<'_>], dots: &[Dots]) -> String {
    let parts = curves.iter().filter_map(|curve| {
        let (first, last) = (curve.bins().next()?, curve.bins().last()?);
        Some(format!(
            "{}: from {} to {}",
            curve.run.name,
            significant(first.mean, 3),
            significant(last.mean, 3)
        ))
    });
    let evaluated = dots.iter().filter_map(|Dots { name, points, .. }| {
        let (first, last) = (points.first()?, points.last()?);
        Some(format!("{name}: from {} to {}", significant(first.1, 3), significant(last.1, 3)))
    });
    format!("Loss over training. {}.", parts.chain(evaluated).collect::<Vec<_>>().join("; "))
}

fn note(curves: &[Curve<'_>]) -> String {
    let mut parts = Vec::new();
    if let Some(size) =
        curves.iter().map(|curve| curve.run.steps().div_ceil(MOST_POINTS)).max().filter(|size| *size > 1)
    {
        parts.push(format!("Lines are means of up to {size} steps; the bands around them reach from the smallest to the largest loss."));
    }
    for curve in curves {
        let broken = || curve.run.losses.iter().enumerate().filter(|(_, loss)| !loss.is_finite());
        if let Some((step, loss)) = broken().next() {
            let (name, count) = (&curve.run.name, broken().count());
            parts.push(format!(
                "{name}: {count} of {} losses are not finite, the first ({loss}) at step {}.",
                curve.run.losses.len(),
                curve.run.first_step + step * curve.run.steps_per_loss.max(1) + 1
            ));
        }
    }
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Evaluation;

    fn places(run: &RunSeries, by_epoch: bool) -> (Vec<f64>, Vec<f64>) {
        let per_unit = run.losses_per(if by_epoch { run.steps_per_epoch } else { 1 });
        let curve = Curve { run, pieces: downsample(&run.losses, MOST_POINTS), per_unit };
        let evaluated = evaluations::of(&[run]);
        let dots = evaluated.iter().flat_map(|evaluated| dots(evaluated, by_epoch).points);
        (curve.bins().map(|bin| curve.x(bin)).collect(), dots.map(|point| point.0).collect())
    }

    #[test]
    fn losses_and_evaluations_count_steps_alike() {
        let evaluation = |step| Evaluation { step, loss: 1., sample: None };
        let evaluations = vec![evaluation(2), evaluation(4)];
        let run = RunSeries { losses: vec![1.; 4], steps_per_epoch: 2, evaluations, ..RunSeries::default() };
        assert_eq!(places(&run, false), (vec![1., 2., 3., 4.], vec![2., 4.]));
        assert_eq!(places(&run, true), (vec![0.5, 1., 1.5, 2.], vec![1., 2.]));
        let later = RunSeries { first_step: 10, evaluations: vec![evaluation(14)], ..run.clone() };
        assert_eq!(places(&later, false), (vec![11., 12., 13., 14.], vec![14.]));
        // Steps 1 and 2, and steps 3 and 4.
        let means = RunSeries { losses: vec![1.; 2], steps_per_loss: 2, ..run };
        assert_eq!(places(&means, false).0, [1.5, 3.5]);
    }
}
