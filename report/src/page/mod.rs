//! The page of a training report: plots and tables in one self-contained file: `--report FILE.html`.

use std::path::Path;

use askama::Template;

use crate::chart::{COLOURS, Chart};
use crate::error::write_page;
use crate::number::{Unit, seconds, significant};
use crate::{
    Error, RankTimes, Report, Result, RunSeries, RunState, bars, curves, evaluations, experts, fact, timeline,
};

#[derive(Template)]
#[template(path = "report.html")]
struct Page<'a> {
    report: &'a Report,
    colours: Vec<Colour>,
    runs: Vec<RunRow<'a>>,
    evaluations: Vec<evaluations::Row<'a>>,
    loads: Vec<experts::Load<'a>>,
    wide: Option<Chart>,
    narrow: Vec<Chart>,
    facts: Vec<(String, String)>,
    /// Number of options that were given.
    given: usize,
}

impl Page<'_> {
    fn is_running(&self) -> bool {
        self.report.state == RunState::Running
    }

    /// Whether this is a language model: only there a perplexity and a text say something.
    fn has_samples(&self) -> bool {
        let mut evaluations = self.report.runs.iter().flat_map(|run| &run.evaluations);
        evaluations.any(|evaluation| evaluation.sample.is_some())
    }

    /// Whether an evaluation measured more than the loss.
    fn has_measures(&self) -> bool {
        let mut evaluations = self.report.runs.iter().flat_map(|run| &run.evaluations);
        evaluations.any(|evaluation| !evaluation.measures.is_empty())
    }

    fn is_stopped(&self) -> bool {
        self.report.state == RunState::Stopped
    }
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

impl Report {
    /// Renders the page: HTML with style, script and plots included, and no links. All text is escaped.
    ///
    /// # Errors
    /// None that is known; errors of the drawing libraries are passed on.
    ///
    /// ```
    /// use report::{Report, RunSeries};
    ///
    /// let run = RunSeries { name: "ddp".into(), losses: vec![4., 2., 1., 0.5], seconds: 0.1, ..Default::default() };
    /// let html = Report { title: "ddp-linear".into(), runs: vec![run], ..Default::default() }.render()?;
    /// assert!(html.contains("<svg") && !html.contains("href"));
    /// # Ok::<(), report::Error>(())
    /// ```
    pub fn render(&self) -> Result<String> {
        let speedup = self.speedup.as_ref().map(bars::speedup).transpose()?.flatten();
        let timelines: Vec<Option<Chart>> =
            self.timelines.iter().map(timeline::chart).collect::<Result<_>>()?;
        let quantities = curves::quantities(&self.runs)?;
        // One bar has nothing to be compared with.
        let (one, ranks) = match &self.ranks[..] {
            [one] => (Some(one), &[][..]),
            all => (None, all),
        };
        let narrow = [bars::times(ranks)?, bars::memory(ranks)?, speedup];
        let page = Page {
            report: self,
            colours: colours(),
            runs: self.runs.iter().map(row).collect(),
            evaluations: evaluations::rows(&self.runs),
            loads: experts::of(&self.runs),
            wide: curves::losses(&self.runs)?,
            narrow: quantities.into_iter().chain(timelines.into_iter().chain(narrow).flatten()).collect(),
            facts: self.facts.iter().cloned().chain(one.into_iter().flat_map(of_one)).collect(),
            given: self.options.iter().filter(|option| !option.is_default).count(),
        };
        page.render().map_err(|error| Error::Page { reason: error.to_string() })
    }

    /// Writes the page to a file.
    ///
    /// # Errors
    /// [`Error::Write`](crate::Error::Write) with the path and the reason.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_page(path, &self.render()?)
    }
}

/// What the page of a run says that goes on, and what it says if the run has ended early.
const STATES: [[&str; 2]; 2] = [
    ["<body data-reload>", "<body>"],
    [
        r#"<strong class="state">running</strong>"#,
        r#"<strong class="state">ended before its last step</strong>"#,
    ],
];

/// Makes the page of a run whose process was killed say that the run has ended early, if it says that it goes on.
///
/// # Errors
/// A page that cannot be read or written.
pub fn mark_stopped(path: &Path) -> Result<()> {
    let page = std::fs::read_to_string(path).map_err(|error| Error::write(path, error))?;
    if !page.contains(STATES[0][0]) {
        return Ok(());
    }
    write_page(
        path,
        &STATES.into_iter().fold(page, |page, [running, stopped]| page.replacen(running, stopped, 1)),
    )
}

fn hex(plotters::prelude::RGBColor(red, green, blue): plotters::prelude::RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// What the plots of time and memory would show of a single rank.
fn of_one(rank: &RankTimes) -> Vec<(String, String)> {
    let memory = rank.peak_rss_bytes.map(|bytes| bytes as f64);
    let memory = memory.map(|bytes| (bytes, Unit::of_bytes(bytes)));
    let memory = memory.map(|(bytes, unit)| {
        fact("peak memory", format!("{} {}", significant(bytes / unit.size, 3), unit.name))
    });
    let time = rank.compute_s + rank.communication_s;
    let time = (time.is_finite() && time > 0.).then(|| fact("time per step", seconds(time)));
    time.into_iter().chain(memory).collect()
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
