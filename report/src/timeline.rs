//! Timeline of a pipeline step: when each rank computes what, planned or measured.

use pipeline::{ActionKind, Plan};
use plotters::element::Rectangle;
use plotters::prelude::Color;

use crate::Result;
use crate::axis::Axis;
use crate::chart::{Chart, Drawn, Frame, Layout, colour, draw};
use crate::number::{Unit, seconds, significant};

/// What each rank does in one step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timeline {
    /// Its title.
    pub title: String,
    /// Start and end of each action: in seconds if it was measured, otherwise in forward passes.
    pub plan: Plan,
    /// Whether it was measured.
    pub measured: bool,
}

const KINDS: [(ActionKind, usize, &str); 4] = [
    (ActionKind::Forward, 0, "forward"),
    (ActionKind::Backward, 1, "backward"),
    (ActionKind::BackwardInput, 4, "backward for the input"),
    (ActionKind::BackwardWeight, 2, "backward for the weights"),
];

/// Draws a row for each rank, the first on top.
pub(super) fn chart(timeline: &Timeline) -> Result<Option<Chart>> {
    let Timeline { title, plan, measured } = timeline;
    let (makespan, ranks) = (plan.makespan(), plan.ranks.len());
    if !(makespan.is_finite() && makespan > 0.) {
        return Ok(None);
    }
    let unit = if *measured { Unit::of_seconds(makespan) } else { Unit { name: "forward passes", size: 1. } };
    let layout = Layout {
        size: (450, 120 + 40 * ranks.min(16) as u32),
        x: Axis::from_zero(makespan / unit.size),
        y: Axis::names((0..ranks).rev().map(|rank| rank.to_string())),
        x_name: &format!("time ({})", unit.name),
        y_name: "rank",
        x_grid: true,
    };
    let svg = draw(title, layout, |frame| paint(frame, plan, unit.size))?;
    let busy: f64 = plan.busy().iter().sum();
    let idle = significant(100. * (1. - busy / (makespan * ranks as f64)), 3);
    let length = match measured {
        true => seconds(makespan),
        false => format!("{} forward passes", significant(makespan, 4)),
    };
    let summary = format!("{length} from the first action to the last; ranks are idle {idle} % of it.");
    let used = |kind: ActionKind| plan.ranks.iter().flatten().any(|span| span.action.kind == kind);
    let legend = KINDS.iter().filter(|(kind, ..)| used(*kind));
    Ok(Some(Chart {
        title: title.clone(),
        svg,
        hover: None,
        legend: legend.map(|(_, series, name)| (*series, name.to_string())).collect(),
        note: summary.clone(),
        summary,
    }))
}

fn paint(frame: &mut Frame<'_, '_>, plan: &Plan, unit: f64) -> Drawn {
    for (rank, spans) in plan.ranks.iter().enumerate() {
        let middle = (plan.ranks.len() - 1 - rank) as f64;
        for span in spans {
            let series = KINDS.iter().find(|(kind, ..)| *kind == span.action.kind).map_or(0, |found| found.1);
            let corners = [(span.start / unit, middle - 0.35), (span.end / unit, middle + 0.35)];
            frame.draw_series([Rectangle::new(corners, colour(series).mix(0.85).filled())])?;
            frame.draw_series([Rectangle::new(corners, colour(series).stroke_width(2))])?;
        }
    }
    Ok(())
}
