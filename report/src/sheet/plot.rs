//! Plots of curves.

use plotters::element::Circle;
use plotters::prelude::Color;
use plotters::series::{DashedLineSeries, LineSeries};

use crate::Result;
use crate::axis::Axis;
use crate::chart::{COLOURS, Chart, Drawn, Frame, Layout, colour, draw, px};
use crate::hover::{Hover, HoverCurve};
use crate::number::significant;

const SIZE: (u32, u32) = (450, 300);

/// A plot of several curves.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plot {
    /// Title.
    pub title: String,
    /// Name of the x axis.
    pub x_name: String,
    /// Name of the y axis.
    pub y_name: String,
    /// Whether the x axis is logarithmic, with ticks at the x values of the curves.
    pub by_factor: bool,
    /// Whether the y axis is logarithmic; otherwise it begins at 0.
    pub log: bool,
    /// The curves.
    pub curves: Vec<Curve>,
    /// Text below the plot.
    pub note: String,
}

/// One curve.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// Points from left to right; those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
    /// Line style.
    pub line: Line,
    /// Colour number.
    pub colour: usize,
}

/// Line style of a curve.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Line {
    /// A line with a dot at each point, for measurements.
    #[default]
    Solid,
    /// A dashed line, for predictions.
    Dashed,
    /// A thin line, for comparison.
    Thin,
}

impl Plot {
    pub(super) fn chart(&self) -> Result<Option<Chart>> {
        let drawable = |(x, y): (f64, f64)| {
            x.is_finite() && y.is_finite() && (!self.by_factor || x > 0.0) && (!self.log || y > 0.0)
        };
        let curves: Vec<(&Curve, Vec<(f64, f64)>)> = self
            .curves
            .iter()
            .map(|curve| (curve, curve.points.iter().copied().filter(|point| drawable(*point)).collect()))
            .collect();
        let points = || curves.iter().flat_map(|(_, points)| points);
        if points().next().is_none() {
            return Ok(None);
        }
        let (x, y) = (self.x(points().map(|point| point.0)), self.y(points().map(|point| point.1)));
        let of_curve = |(curve, points): &(&Curve, Vec<(f64, f64)>)| HoverCurve {
            name: curve.name.clone(),
            colour: curve.colour % COLOURS.len(),
            points: points.clone(),
        };
        let hover = Hover::new(&self.x_name, &x, &y, curves.iter().map(of_curve).collect());
        let layout = Layout { size: SIZE, x, y, x_name: &self.x_name, y_name: &self.y_name, x_grid: true };
        let svg = draw(&self.title, layout, |frame| paint(frame, &curves))?;
        let legend = curves.iter().filter(|(_, points)| !points.is_empty());
        Ok(Some(Chart {
            title: self.title.clone(),
            summary: summary(&curves),
            legend: legend.map(|(curve, _)| (curve.colour, curve.name.clone())).collect(),
            note: self.note.clone(),
            hover: Some(hover),
            svg,
        }))
    }

    fn x(&self, values: impl Iterator<Item = f64>) -> Axis {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        match self.by_factor {
            true => Axis::at(&values),
            false => Axis::linear(values[0], values[values.len() - 1]),
        }
    }

    fn y(&self, values: impl Iterator<Item = f64>) -> Axis {
        let (low, high) =
            values.fold((f64::INFINITY, 0f64), |(low, high), value| (low.min(value), high.max(value)));
        match self.log {
            true => Axis::log(low / 1.15, high * 1.15),
            false => Axis::from_zero(high),
        }
    }
}

fn paint(frame: &mut Frame<'_, '_>, curves: &[(&Curve, Vec<(f64, f64)>)]) -> Drawn {
    for (curve, points) in curves {
        let (points, ink) = (points.iter().copied(), colour(curve.colour));
        match curve.line {
            Line::Solid => {
                frame.draw_series(LineSeries::new(points.clone(), ink.stroke_width(px(2) as u32)))?;
                frame.draw_series(points.map(|point| Circle::new(point, px(4), ink.filled())))?;
            }
            Line::Dashed => {
                let style = ink.stroke_width(px(2) as u32);
                frame.draw_series(DashedLineSeries::new(points, px(6) as u32, px(4) as u32, style))?;
            }
            Line::Thin => {
                frame.draw_series(LineSeries::new(points, ink.stroke_width(px(1) as u32)))?;
            }
        }
    }
    Ok(())
}

fn summary(curves: &[(&Curve, Vec<(f64, f64)>)]) -> String {
    let parts = curves.iter().filter_map(|(curve, points)| {
        let (first, last) = (points.first()?, points.last()?);
        let [first_x, first_y, last_x, last_y] =
            [first.0, first.1, last.0, last.1].map(|value| significant(value, 3));
        Some(format!("{}: {first_y} at {first_x} to {last_y} at {last_x}", curve.name))
    });
    format!("{}.", parts.collect::<Vec<_>>().join("; "))
}
