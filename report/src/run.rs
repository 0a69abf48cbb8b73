//! What a training report shows: its runs with their losses and evaluations, and the times of its ranks.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde::{Deserialize, Serialize};

use crate::Timeline;

/// The content of a report. Parts without data are left out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// What ran: the command's name.
    pub title: String,
    /// The command line.
    pub command_line: String,
    /// Date and time in RFC 3339 format; see [`now_rfc3339`](crate::now_rfc3339).
    pub date: String,
    /// Host name.
    pub host: String,
    /// Further facts: name and value, in this order.
    pub facts: Vec<(String, String)>,
    /// The program's options, with those that were not given.
    pub options: Vec<OptionValue>,
    /// Whether the run goes on. Default: it has ended.
    pub state: RunState,
    /// The runs whose losses are drawn together.
    pub runs: Vec<RunSeries>,
    /// Time and memory of each rank.
    pub ranks: Vec<RankTimes>,
    /// One process compared to several ranks.
    pub speedup: Option<Speedup>,
    /// Timelines of pipeline steps.
    pub timelines: Vec<Timeline>,
}

/// An option of the program that ran.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OptionValue {
    /// Its name, as it is typed.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Whether it was not given.
    pub is_default: bool,
}

/// How far a run has got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RunState {
    /// It has ended.
    #[default]
    Ended,
    /// It goes on, and the page is written again and again: a browser loads it again and again, too.
    Running,
    /// It has failed or was stopped.
    Stopped,
}

/// One training run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSeries {
    /// Its name.
    pub name: String,
    /// The loss of each step, in order; or means over [`steps_per_loss`](Self::steps_per_loss) steps each.
    pub losses: Vec<f32>,
    /// Number of steps over which each loss is a mean; 0 counts as 1.
    pub steps_per_loss: usize,
    /// Number of steps before the first loss, from an earlier part of the run whose losses are unknown. Default 0.
    #[serde(default)]
    pub first_step: usize,
    /// Total number of steps; 0 if the losses cover all of them.
    pub steps: usize,
    /// Time of the training loop, in seconds.
    pub seconds: f64,
    /// Number of ranks.
    pub world_size: usize,
    /// Steps per epoch; 0 if there are no epochs, which makes steps the unit of the x axis.
    pub steps_per_epoch: usize,
    /// Evaluations during the run, in order of their steps.
    #[serde(default)]
    pub evaluations: Vec<Evaluation>,
    /// How many tokens each expert had in the last step that was logged; `None` without experts.
    #[serde(default)]
    pub experts: Option<RoutedTokens>,
    /// Further quantities of each step; those of all runs that have the same name are drawn in one plot.
    #[serde(default)]
    pub quantities: Vec<Quantity>,
}

/// A quantity that each step of a run has, such as the learning rate.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantity {
    /// Its name, with the unit.
    pub name: String,
    /// Its values, for the same steps as [`RunSeries::losses`]; NaN where it is not known.
    pub values: Vec<f32>,
}

/// How many tokens each expert of a model had in a step, on all ranks together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RoutedTokens {
    /// The step, from 1.
    pub step: usize,
    /// The routers, in the order of layers.
    pub routers: Vec<RouterTokens>,
}

/// How many tokens each expert of one router had.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RouterTokens {
    /// The router's name.
    pub router: String,
    /// Number of tokens by expert.
    pub tokens: Vec<u64>,
}

/// What was found of pairs of answers in training on preferences: means over pairs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct PairMetrics {
    /// Reward of the chosen answers.
    pub reward_chosen: f64,
    /// Reward of the rejected answers.
    pub reward_rejected: f64,
    /// The difference of both.
    pub margin: f64,
    /// The share of pairs whose chosen answer has the greater reward.
    pub accuracy: f64,
}

impl PairMetrics {
    /// The same as an evaluation's measures.
    pub fn measures(&self) -> [(&'static str, f64); 4] {
        [
            ("margin", self.margin),
            ("accuracy", self.accuracy),
            ("reward_chosen", self.reward_chosen),
            ("reward_rejected", self.reward_rejected),
        ]
    }

    /// What the page of a run draws: names and values.
    pub fn quantities(&self) -> [(&'static str, f64); 4] {
        [
            ("Margin of rewards", self.margin),
            ("Accuracy of rewards (%)", 100.0 * self.accuracy),
            ("Reward of chosen answers", self.reward_chosen),
            ("Reward of rejected answers", self.reward_rejected),
        ]
    }
}

/// Result of a run on data that it was not trained on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Number of steps done before it.
    pub step: usize,
    /// The mean loss.
    pub loss: f64,
    /// A text that the model generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<String>,
    /// What else was measured, such as accuracy.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measures: BTreeMap<String, f64>,
}

impl RunSeries {
    pub(crate) fn steps(&self) -> usize {
        if self.steps > 0 { self.steps } else { self.losses.len() * self.steps_per_loss.max(1) }
    }

    /// Number of losses that the steps before the first one would have had.
    pub(crate) fn before(&self) -> f64 {
        self.losses_per(self.first_step)
    }

    /// Converts a number of steps to a number of losses.
    pub(crate) fn losses_per(&self, steps: usize) -> f64 {
        steps as f64 / self.steps_per_loss.max(1) as f64
    }
}

/// Mean times of one rank's step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankTimes {
    /// The rank.
    pub rank: usize,
    /// Time of one step without what was spent waiting for communication, in seconds.
    pub compute_s: f64,
    /// Time of one step spent waiting for communication, in seconds.
    pub communication_s: f64,
    /// Peak memory in bytes, if known.
    pub peak_rss_bytes: Option<u64>,
}

/// One process compared to several ranks on the same work.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Speedup {
    /// Time of the training loop on one process, in seconds.
    pub single_s: f64,
    /// Time of the training loop on all ranks, in seconds.
    pub ddp_s: f64,
    /// Number of ranks.
    pub ranks: usize,
}

/// Makes an entry of [`Report::facts`] or [`Sheet::facts`](crate::sheet::Sheet::facts).
pub fn fact(name: &str, value: impl Display) -> (String, String) {
    (name.to_string(), value.to_string())
}

/// Formats a count with its noun: `1 rank`, `2 ranks`.
pub fn counted(count: usize, thing: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{ending}")
}
