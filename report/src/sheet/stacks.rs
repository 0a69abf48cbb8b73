//! Stacked bar plots.

use crate::Result;
use crate::axis::Axis;
use crate::bars::{Bar, clean, paint};
use crate::chart::{Chart, Layout, draw_full_width};
use crate::number::significant;

/// Bars beside each other, each made of stacked parts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stacks {
    /// Title.
    pub title: String,
    /// Name of the y axis.
    pub y_name: String,
    /// Names of the parts, from the bottom; each has its own colour.
    pub parts: Vec<String>,
    /// The name below each bar, and the heights of its parts.
    pub bars: Vec<(String, Vec<f64>)>,
    /// Text below the plot.
    pub note: String,
}

impl Stacks {
    pub(super) fn chart(&self) -> Result<Option<Chart>> {
        let bars: Vec<Bar> = self
            .bars
            .iter()
            .map(|(_, heights)| Bar { parts: heights.iter().copied().map(clean).enumerate().collect() })
            .collect();
        let largest = bars.iter().map(Bar::top).fold(0.0, f64::max);
        if largest <= 0.0 {
            return Ok(None);
        }
        let layout = |size| Layout {
            size,
            x: Axis::names(self.bars.iter().map(|(name, _)| name.clone())),
            y: Axis::from_zero(largest),
            x_name: "",
            y_name: &self.y_name,
            x_grid: false,
        };
        let svg = draw_full_width(&self.title, 300, layout, |frame| paint(frame, &bars))?;
        let text = self
            .bars
            .iter()
            .zip(&bars)
            .map(|((name, _), bar)| format!("{name}: {}", significant(bar.top(), 3)));
        Ok(Some(Chart {
            title: self.title.clone(),
            svg,
            hover: None,
            legend: self.parts.iter().cloned().enumerate().collect(),
            note: self.note.clone(),
            summary: format!("{}.", text.collect::<Vec<_>>().join("; ")),
        }))
    }
}
