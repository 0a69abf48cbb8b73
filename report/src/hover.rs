//! The values of a plot of curves, for the page's script, which shows those at the pointer.

use serde::Serialize;

use crate::axis::Axis;

/// The curves of a plot, and how values become places in the picture.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Hover {
    x_name: String,
    /// Lowest value, highest value, and whether the axis is logarithmic.
    x: (f64, f64, bool),
    y: (f64, f64, bool),
    curves: Vec<HoverCurve>,
}

/// A curve with its points from left to right.
#[derive(Debug, Clone, Serialize)]
pub(super) struct HoverCurve {
    pub(super) name: String,
    /// Number of its colour.
    pub(super) colour: usize,
    pub(super) points: Vec<(f64, f64)>,
}

impl Hover {
    pub(super) fn new(x_name: &str, x: &Axis, y: &Axis, mut curves: Vec<HoverCurve>) -> Self {
        // Six digits are more than a plot shows, and keep the page small.
        let short = |value: f64| format!("{value:.5e}").parse().unwrap_or(value);
        for point in curves.iter_mut().flat_map(|curve| &mut curve.points) {
            *point = (short(point.0), short(point.1));
        }
        Self { x_name: x_name.to_string(), x: x.ends(), y: y.ends(), curves }
    }

    /// As JSON, for an attribute of the plot.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}
