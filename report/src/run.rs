//! What a run did, as plots in one self-contained file: `--report FILE.html`.

use std::fmt::Display;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::write_page;
use crate::{Result, Timeline, page};

/// What a report shows. A part without data is left out of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// What ran: the command's name.
    pub title: String,
    /// How it was called.
    pub command_line: String,
    /// When, as RFC 3339; see [`now_rfc3339`](crate::now_rfc3339).
    pub date: String,
    /// Where.
    pub host: String,
    /// What else is worth to know: name and value, in this order.
    pub facts: Vec<(String, String)>,
    /// The runs whose losses are drawn together.
    pub runs: Vec<RunSeries>,
    /// How the ranks spent their time, and their memory.
    pub ranks: Vec<RankTimes>,
    /// One process against several ranks.
    pub speedup: Option<Speedup>,
    /// What the ranks of a pipeline do in a step.
    pub timelines: Vec<Timeline>,
}

/// One run of training.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSeries {
    /// What to call it.
    pub name: String,
    /// The loss of each step, in order; or the means of [`steps_per_loss`](Self::steps_per_loss) steps each.
    pub losses: Vec<f32>,
    /// Steps that each of the losses stands for; 0 counts as 1.
    pub steps_per_loss: usize,
    /// Steps before the first of the losses, in an earlier part of the run of which nothing is known. Default 0.
    #[serde(default)]
    pub first_step: usize,
    /// Steps in all; 0 where as many as the losses stand for.
    pub steps: usize,
    /// Time of the training loop, in seconds.
    pub seconds: f64,
    /// Ranks that took part.
    pub world_size: usize,
    /// Steps of one epoch; 0 where there are none, which puts steps on the axis in place of epochs.
    pub steps_per_epoch: usize,
    /// Evaluations meanwhile, in order of their steps.
    #[serde(default)]
    pub evaluations: Vec<Evaluation>,
}

/// What a run came to on data that it was not trained on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps that were done.
    pub step: usize,
    /// The mean loss.
    pub loss: f64,
    /// A text that the model wrote then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<String>,
}

impl RunSeries {
    pub(crate) fn steps(&self) -> usize {
        if self.steps > 0 { self.steps } else { self.losses.len() * self.steps_per_loss.max(1) }
    }

    /// Losses that would be those of the steps before the first.
    pub(crate) fn before(&self) -> f64 {
        self.losses_per(self.first_step)
    }

    /// Losses in a unit of the x axis.
    pub(crate) fn losses_per(&self, steps: usize) -> f64 {
        steps as f64 / self.steps_per_loss.max(1) as f64
    }
}

/// One rank's mean step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankTimes {
    /// The rank.
    pub rank: usize,
    /// Time of one step without what was spent waiting for communication, in seconds.
    pub compute_s: f64,
    /// Time of one step spent waiting for communication, in seconds.
    pub communication_s: f64,
    /// The most memory that it held, in bytes, where known.
    pub peak_rss_bytes: Option<u64>,
}

/// One process against several ranks on the same work.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Speedup {
    /// Time of the training loop on one process, in seconds.
    pub single_s: f64,
    /// Time of the training loop on all ranks, in seconds.
    pub ddp_s: f64,
    /// How many ranks.
    pub ranks: usize,
}

/// A line of [`Report::facts`] or [`Sheet::facts`](crate::sheet::Sheet::facts).
pub fn fact(name: &str, value: impl Display) -> (String, String) {
    (name.to_string(), value.to_string())
}

impl Report {
    /// The page: HTML with its style and plots inside, and no link to anywhere. All text is escaped.
    ///
    /// # Errors
    /// None that is known; those of the libraries that draw are passed on.
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
        page::render(self)
    }

    /// Writes the page to a file.
    ///
    /// # Errors
    /// [`Error::Write`](crate::Error::Write) with the path and the reason.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_page(path, &self.render()?)
    }
}
