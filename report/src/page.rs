//! Renders the HTML page of a report.

use askama::Template;

use crate::chart::{COLOURS, Chart};
use crate::number::{seconds, significant};
use crate::{Error, Report, Result, RunSeries, bars, curves, evaluations, timeline};

#[derive(Template)]
#[template(path = "report.html")]
struct Page<'a> {
    report: &'a Report,
    colours: Vec<Colour>,
    runs: Vec<RunRow<'a>>,
    evaluations: Vec<evaluations::Row<'a>>,
    wide: Option<Chart>,
    narrow: Vec<Chart>,
}

/// A series' colour in the plots, and its replacement on a dark page.
pub(super) struct Colour {
    pub(super) drawn: String,
    pub(super) dark: &'static str,
}

/// Returns all colours.
pub(super) fn colours() -> Vec<Colour> {
    COLOURS.iter().map(|&(drawn, dark)| Colour { drawn: hex(drawn), dark }).collect()
}

/// A row of the table of runs.
struct RunRow<'a> {
    name: &'a str,
    world_size: usize,
    steps: usize,
    time: String,
    rate: String,
    first: String,
    last: String,
}

pub(super) fn render(report: &Report) -> Result<String> {
    let speedup = report.speedup.as_ref().map(bars::speedup).transpose()?.flatten();
    let timelines: Vec<Option<Chart>> =
        report.timelines.iter().map(timeline::chart).collect::<Result<_>>()?;
    let narrow = [bars::times(&report.ranks)?, bars::memory(&report.ranks)?, speedup];
    let page = Page {
        report,
        colours: colours(),
        runs: report.runs.iter().map(row).collect(),
        evaluations: evaluations::rows(&report.runs),
        wide: curves::losses(&report.runs)?,
        narrow: timelines.into_iter().chain(narrow).flatten().collect(),
    };
    page.render().map_err(|error| Error::Page { reason: error.to_string() })
}

fn hex(plotters::prelude::RGBColor(red, green, blue): plotters::prelude::RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

fn row(run: &RunSeries) -> RunRow<'_> {
    let loss =
        |loss: Option<&f32>| loss.map_or_else(|| "–".to_string(), |&loss| significant(f64::from(loss), 4));
    let known = run.seconds.is_finite() && run.seconds > 0.;
    RunRow {
        name: &run.name,
        world_size: run.world_size,
        steps: run.steps(),
        time: if known { seconds(run.seconds) } else { "–".to_string() },
        rate: if known { significant(run.steps() as f64 / run.seconds, 3) } else { "–".to_string() },
        first: loss(run.losses.first()),
        last: loss(run.losses.last()),
    }
}

#[cfg(test)]
mod tests;
