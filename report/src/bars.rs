//! Bar plots: time and memory by rank, and the speed-up.

use plotters::element::{Rectangle, Text};
use plotters::prelude::{BLACK, Color};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{IntoFont, IntoTextStyle, TextStyle};

use crate::axis::Axis;
use crate::chart::{Chart, Drawn, Frame, Layout, colour, draw, px, text};
use crate::number::{Unit, seconds, significant};
use crate::{RankTimes, Result, Speedup};

const SIZE: (u32, u32) = (450, 300);
/// With more bars than this, no values are written above them.
const MOST_NUMBERS: usize = 10;

/// A bar of stacked parts, each with its colour number and its height.
pub(super) struct Bar {
    pub(super) parts: Vec<(usize, f64)>,
}

impl Bar {
    pub(super) fn top(&self) -> f64 {
        self.parts.iter().map(|(_, height)| height).sum()
    }
}

/// Plot of the time of a step by rank, computing and communicating.
pub(super) fn times(ranks: &[RankTimes]) -> Result<Option<Chart>> {
    let largest =
        ranks.iter().map(|rank| clean(rank.compute_s) + clean(rank.communication_s)).fold(0., f64::max);
    if largest <= 0. {
        return Ok(None);
    }
    let unit = Unit::of_seconds(largest);
    let bars = ranks.iter().map(|rank| Bar {
        parts: vec![(0, clean(rank.compute_s) / unit.size), (1, clean(rank.communication_s) / unit.size)],
    });
    let (compute, communication) =
        (total(ranks, |rank| rank.compute_s), total(ranks, |rank| rank.communication_s));
    let share = significant(100. * communication / (compute + communication), 2);
    let summary =
        format!("Up to {} a step; {share} % of it communication, over all ranks.", seconds(largest));
    Ok(Some(Chart {
        title: "Time per step by rank".to_string(),
        svg: by_rank(
            "Time per step",
            ranks,
            &format!("time per step ({})", unit.name),
            &bars.collect::<Vec<_>>(),
        )?,
        hover: None,
        legend: vec![(0, "compute".to_string()), (1, "communication".to_string())],
        note: summary.clone(),
        summary,
    }))
}

/// Plot of the peak memory of each rank.
pub(super) fn memory(ranks: &[RankTimes]) -> Result<Option<Chart>> {
    let bytes = |rank: &RankTimes| rank.peak_rss_bytes.unwrap_or(0) as f64;
    let largest = ranks.iter().map(bytes).fold(0., f64::max);
    if largest <= 0. {
        return Ok(None);
    }
    let unit = Unit::of_bytes(largest);
    let bars: Vec<_> = ranks.iter().map(|rank| Bar { parts: vec![(3, bytes(rank) / unit.size)] }).collect();
    let sum = significant(ranks.iter().map(bytes).sum::<f64>() / unit.size, 3);
    let summary = format!(
        "At most {} {} on one rank, {sum} {} in all.",
        significant(largest / unit.size, 3),
        unit.name,
        unit.name
    );
    Ok(Some(Chart {
        title: "Peak memory by rank".to_string(),
        svg: by_rank("Peak memory", ranks, &format!("resident memory ({})", unit.name), &bars)?,
        hover: None,
        legend: vec![(3, "most held at once".to_string())],
        note: summary.clone(),
        summary,
    }))
}

/// Plot of the measured speed-up over one process, beside the ideal one.
pub(super) fn speedup(speedup: &Speedup) -> Result<Option<Chart>> {
    let factor = speedup.single_s / speedup.ddp_s;
    if !(factor.is_finite() && factor > 0.) || speedup.ranks == 0 {
        return Ok(None);
    }
    let ideal = speedup.ranks as f64;
    let bars = [Bar { parts: vec![(2, factor)] }, Bar { parts: vec![(5, ideal)] }];
    let layout = Layout {
        size: SIZE,
        x: Axis::names(["measured", "ideal"].map(String::from).into_iter()),
        y: Axis::from_zero(factor.max(ideal)),
        x_name: "",
        y_name: "times as fast as one process",
        x_grid: false,
    };
    let title = format!("Speed-up of {} ranks", speedup.ranks);
    let svg = draw(&title, layout, |frame| paint(frame, &bars))?;
    let summary = format!(
        "One process took {}, {} ranks {}: {} times as fast, {} % of the ideal.",
        seconds(speedup.single_s),
        speedup.ranks,
        seconds(speedup.ddp_s),
        significant(factor, 3),
        significant(100. * factor / ideal, 2),
    );
    let legend = vec![(2, "measured".to_string()), (5, "ideal".to_string())];
    Ok(Some(Chart { title, svg, hover: None, legend, note: summary.clone(), summary }))
}

fn by_rank(title: &str, ranks: &[RankTimes], y_name: &str, bars: &[Bar]) -> Result<String> {
    let layout = Layout {
        size: SIZE,
        x: Axis::names(ranks.iter().map(|rank| rank.rank.to_string())),
        y: Axis::from_zero(bars.iter().map(Bar::top).fold(0., f64::max)),
        x_name: "rank",
        y_name,
        x_grid: false,
    };
    draw(title, layout, |frame| paint(frame, bars))
}

pub(super) fn paint(frame: &mut Frame<'_, '_>, bars: &[Bar]) -> Drawn {
    // At most 56 pixels of the page wide, however few bars there are.
    let place = frame.plotting_area().dim_in_pixel().0 as f64 / bars.len().max(1) as f64;
    let half = (f64::from(px(56)) / place).min(0.7) / 2.;
    let above = Pos::new(HPos::Center, VPos::Bottom);
    let style: TextStyle<'_> =
        ("sans-serif", text(12)).into_font().color(&BLACK).into_text_style(frame.plotting_area()).pos(above);
    for (index, bar) in bars.iter().enumerate() {
        let middle = index as f64;
        let mut bottom = 0.;
        for &(series, height) in &bar.parts {
            let corners = [(middle - half, bottom), (middle + half, bottom + height)];
            frame.draw_series([Rectangle::new(corners, colour(series).filled())])?;
            bottom += height;
        }
        if bars.len() <= MOST_NUMBERS {
            let label = significant(bar.top(), 3);
            frame.draw_series([Text::new(label, (middle, bottom), style.clone())])?;
        }
    }
    Ok(())
}

fn total(ranks: &[RankTimes], time: impl Fn(&RankTimes) -> f64) -> f64 {
    ranks.iter().map(|rank| clean(time(rank))).sum()
}

/// Makes a time drawable: 0 if it is negative or not finite.
pub(super) fn clean(time: f64) -> f64 {
    if time.is_finite() { time.max(0.) } else { 0. }
}
