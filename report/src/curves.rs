//! Curves over the steps of runs: the losses of all runs in one plot, and each further quantity in another.

use plotters::element::{Circle, Polygon};
use plotters::prelude::Color;
use plotters::series::LineSeries;

use crate::axis::Axis;
use crate::chart::{COLOURS, Chart, Drawn, Frame, Layout, colour, draw, draw_full_width, px};
use crate::evaluations::{self, Evaluated};
use crate::hover::{Hover, HoverCurve};
use crate::number::significant;
use crate::thin::{Bin, downsample};
use crate::{Result, RunSeries};

const TITLE: &str = "Loss";
/// Enough for the width of the page; more would only draw noise.
const MOST_POINTS: usize = 400;
/// Size and number of points of a plot of a further quantity.
const SIZE: (u32, u32) = (450, 240);
const FEW_POINTS: usize = 200;
/// A quantity whose largest value is more times its smallest one has a logarithmic axis.
const WIDE: f64 = 30.0;

/// One run's curve, ready to draw.
struct Curve<'a> {
    run: &'a RunSeries,
    name: String,
    colour: usize,
    pieces: Vec<Vec<Bin>>,
    /// Number of losses in one unit of the x axis.
    per_unit: f64,
}

impl<'a> Curve<'a> {
    /// The curve of a run's values, of which there is one for each loss.
    fn new(
        run: &'a RunSeries,
        (name, colour): (String, usize),
        values: &[f32],
        most: usize,
        by_epoch: bool,
    ) -> Self {
        let per_unit = run.losses_per(if by_epoch { run.steps_per_epoch } else { 1 });
        Self { run, name, colour, pieces: downsample(values, most), per_unit }
    }

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

    fn hover(&self) -> HoverCurve {
        let points = self.bins().map(|bin| (self.x(bin), bin.mean));
        HoverCurve { name: self.name.clone(), colour: self.colour, points: points.collect() }
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

/// What a plot shows.
struct Shown<'a> {
    curves: Vec<Curve<'a>>,
    dots: Vec<Dots>,
    by_epoch: bool,
}

impl Shown<'_> {
    /// The smallest and the largest of some numbers of its points; `None` if it has no curve.
    fn range(
        &self,
        of_bin: impl Fn(&Bin) -> [f64; 2],
        of_point: impl Fn(&(f64, f64)) -> f64,
    ) -> Option<(f64, f64)> {
        self.curves.iter().flat_map(Curve::bins).next()?;
        let bins = self.curves.iter().flat_map(Curve::bins).flat_map(of_bin);
        let all = bins.chain(self.dots.iter().flat_map(|dots| &dots.points).map(of_point));
        Some(
            all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            }),
        )
    }

    fn x_name(&self) -> &'static str {
        if self.by_epoch { "epoch" } else { "step" }
    }

    fn x_axis(&self) -> Axis {
        let points = || self.dots.iter().flat_map(|dots| &dots.points).map(|point| point.0);
        let begin =
            self.curves.iter().map(|curve| curve.ends().0).chain(points()).fold(f64::INFINITY, f64::min);
        let end = self.curves.iter().map(|curve| curve.ends().1).chain(points()).fold(0., f64::max);
        Axis::linear(begin, end)
    }

    fn hover(&self, y: &Axis) -> Hover {
        let dots = self.dots.iter().map(|dots| HoverCurve {
            name: dots.name.clone(),
            colour: dots.colour,
            points: dots.points.clone(),
        });
        Hover::new(
            self.x_name(),
            &self.x_axis(),
            y,
            self.curves.iter().map(Curve::hover).chain(dots).collect(),
        )
    }
}

/// The runs that have losses, and whether all of them have epochs.
fn drawn(runs: &[RunSeries]) -> (Vec<&RunSeries>, bool) {
    let runs: Vec<_> = runs.iter().filter(|run| !run.losses.is_empty()).collect();
    let by_epoch = runs.iter().all(|run| run.steps_per_epoch > 0);
    (runs, by_epoch)
}

/// Name and colour of a run's curve: that of a single run says what it is, since the layout is no help there.
fn label(runs: &[&RunSeries], number: usize) -> (String, usize) {
    let name = if runs.len() == 1 { "training".to_string() } else { runs[number].name.clone() };
    (name, number % COLOURS.len())
}

/// Draws the losses; `None` if none is finite.
pub(super) fn losses(runs: &[RunSeries]) -> Result<Option<Chart>> {
    let (runs, by_epoch) = drawn(runs);
    let curves = runs
        .iter()
        .enumerate()
        .map(|(number, run)| Curve::new(run, label(&runs, number), &run.losses, MOST_POINTS, by_epoch));
    let dots = evaluations::of(&runs).iter().map(|evaluated| dots(evaluated, by_epoch)).collect();
    let shown = Shown { curves: curves.collect(), dots, by_epoch };
    let Some((low, high)) = shown.range(|bin| [bin.low, bin.high], |point| point.1) else { return Ok(None) };
    let y = if low > 0. { Axis::log(low / 1.08, high * 1.08) } else { padded(low, high) };
    let layout = |size| Layout {
        size,
        x: shown.x_axis(),
        y: y.clone(),
        x_name: shown.x_name(),
        y_name: if low > 0. { "loss (log scale)" } else { "loss" },
        x_grid: true,
    };
    let svg = draw_full_width(TITLE, 360, layout, |frame| paint(frame, &shown))?;
    let legend = shown.curves.iter().map(|curve| (curve.colour, curve.name.clone()));
    Ok(Some(Chart {
        title: TITLE.to_string(),
        summary: summary("Loss over training", &shown),
        legend: legend.chain(shown.dots.iter().map(|dots| (dots.colour, dots.name.clone()))).collect(),
        note: note(&shown.curves),
        hover: Some(shown.hover(&y)),
        svg,
    }))
}

/// Draws each quantity that the steps of runs have, in the order in which they come.
pub(super) fn quantities(runs: &[RunSeries]) -> Result<Vec<Chart>> {
    let (runs, by_epoch) = drawn(runs);
    let mut names: Vec<&str> = Vec::new();
    for quantity in runs.iter().flat_map(|run| &run.quantities) {
        if !names.contains(&&*quantity.name) {
            names.push(&quantity.name);
        }
    }
    let charts = names.into_iter().map(|name| quantity(&runs, by_epoch, name));
    Ok(charts.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

fn quantity(runs: &[&RunSeries], by_epoch: bool, name: &str) -> Result<Option<Chart>> {
    let with = runs.iter().enumerate().filter_map(|(number, run)| {
        let found = run.quantities.iter().find(|quantity| quantity.name == name)?;
        Some(Curve::new(run, label(runs, number), &found.values, FEW_POINTS, by_epoch))
    });
    let shown = Shown { curves: with.collect(), dots: Vec::new(), by_epoch };
    let Some((low, high)) = shown.range(|bin| [bin.low, bin.high], |point| point.1) else { return Ok(None) };
    let y = match low > 0. && high > WIDE * low {
        true => Axis::log(low / 1.08, high * 1.08),
        false if low >= 0. => Axis::from_zero(high),
        false => padded(low, high),
    };
    let (x, y_axis) = (shown.x_axis(), y.clone());
    let layout = Layout { size: SIZE, x, y: y_axis, x_name: shown.x_name(), y_name: "", x_grid: true };
    let svg = draw(name, layout, |frame| paint(frame, &shown))?;
    let legend = shown.curves.iter().filter(|_| runs.len() > 1);
    Ok(Some(Chart {
        title: name.to_string(),
        summary: summary(name, &shown),
        legend: legend.map(|curve| (curve.colour, curve.name.clone())).collect(),
        note: String::new(),
        hover: Some(shown.hover(&y)),
        svg,
    }))
}

fn padded(low: f64, high: f64) -> Axis {
    let margin = (high - low) * 0.05;
    Axis::linear(low - margin, high + margin)
}

fn paint(frame: &mut Frame<'_, '_>, shown: &Shown<'_>) -> Drawn {
    for curve in &shown.curves {
        for piece in &curve.pieces {
            if piece.iter().any(|bin| bin.low < bin.high) {
                let above = piece.iter().map(|bin| (curve.x(bin), bin.high));
                let below = piece.iter().rev().map(|bin| (curve.x(bin), bin.low));
                let band = above.chain(below).collect::<Vec<_>>();
                frame.draw_series([Polygon::new(band, colour(curve.colour).mix(0.22))])?;
            }
        }
    }
    for (number, curve) in shown.curves.iter().enumerate() {
        let ink = colour(curve.colour);
        for piece in &curve.pieces {
            let points = || piece.iter().map(|bin| (curve.x(bin), bin.mean));
            if piece.len() == 1 {
                frame.draw_series(points().map(|point| Circle::new(point, px(3), ink.filled())))?;
            } else {
                // The first line is wider than the others, so that two equal curves both remain visible.
                let width = if number == 0 { px(3) } else { px(3) / 2 };
                frame.draw_series(LineSeries::new(points(), ink.stroke_width(width as u32)))?;
            }
        }
    }
    for Dots { colour: number, points, .. } in &shown.dots {
        let ink = colour(*number);
        frame.draw_series(LineSeries::new(points.iter().copied(), ink.stroke_width(px(2) as u32)))?;
        frame.draw_series(points.iter().map(|point| Circle::new(*point, px(4), ink.filled())))?;
    }
    Ok(())
}

fn summary(what: &str, shown: &Shown<'_>) -> String {
    let parts = shown.curves.iter().filter_map(|curve| {
        let (first, last) = (curve.bins().next()?, curve.bins().last()?);
        Some(format!("{}: from {} to {}", curve.name, significant(first.mean, 3), significant(last.mean, 3)))
    });
    let evaluated = shown.dots.iter().filter_map(|Dots { name, points, .. }| {
        let (first, last) = (points.first()?, points.last()?);
        Some(format!("{name}: from {} to {}", significant(first.1, 3), significant(last.1, 3)))
    });
    format!("{what}. {}.", parts.chain(evaluated).collect::<Vec<_>>().join("; "))
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
            let (name, count) = (&curve.name, broken().count());
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
        let curve = Curve::new(run, (String::new(), 0), &run.losses, MOST_POINTS, by_epoch);
        let evaluated = evaluations::of(&[run]);
        let dots = evaluated.iter().flat_map(|evaluated| dots(evaluated, by_epoch).points);
        (curve.bins().map(|bin| curve.x(bin)).collect(), dots.map(|point| point.0).collect())
    }

    #[test]
    fn losses_and_evaluations_count_steps_alike() {
        let evaluation = |step| Evaluation { step, loss: 1., sample: None, ..Evaluation::default() };
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
