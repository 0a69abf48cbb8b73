//! `--task` and `--labels`: a head that scores documents in place of one that predicts tokens.

use std::path::Path;

use clap::{Args, ValueEnum};
use models::{LabelsConfig, Lora, ModelConfig, Problem, Tokenizer, Weights};
use ops::{PreferenceConfig, PreferenceLoss};

use crate::error::{Error, Result};
use crate::options::value_name;

/// What documents are scored for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TaskOption {
    /// One label of several.
    SingleLabel,
    /// Any of several labels.
    MultiLabel,
    /// A number, or as many as there are labels.
    Regression,
    /// A number, learned from pairs of which one is better.
    Reward,
}

impl TaskOption {
    fn problem(self) -> Problem {
        match self {
            Self::SingleLabel => Problem::SingleLabel,
            Self::MultiLabel => Problem::MultiLabel,
            Self::Regression | Self::Reward => Problem::Regression,
        }
    }
}

/// The head of `finetune`.
#[derive(Debug, Clone, Args)]
pub(super) struct LabelOptions {
    /// Label documents in place of writing [default: folder's]
    ///
    /// The model gets a new head, drawn from --seed, that scores each document as a whole, by its last token; the data's lines
    /// then have a `label` beside their text; or, for a reward model (`reward`), `chosen` and `rejected`, and maybe a `prompt` and a
    /// `margin`. A folder whose model labels documents already is trained further without this option, and on pairs with it.
    #[arg(long, value_name = "TASK", value_enum, help_heading = "Training")]
    task: Option<TaskOption>,
    /// Names of the labels, such as ham,spam
    ///
    /// Their order is that of their numbers, from 0. A regression needs none for a single number.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "task", help_heading = "Training")]
    labels: Option<Vec<String>>,
    /// Draw rewards to a mean of 0, by this much [default: 0]
    ///
    /// The loss of a pair has this many times the square of the sum of both rewards (`center_rewards_coefficient` of TRL, which
    /// recommends 0.01).
    #[arg(long, value_name = "C", value_parser = centering, requires = "task", help_heading = "Training", allow_negative_numbers = true)]
    center_rewards: Option<f64>,
}

fn centering(text: &str) -> std::result::Result<f64, &'static str> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or("give a number, 0 or more, such as 0.01")
}

impl LabelOptions {
    /// Opens the weights of a folder, with a new head if that is asked for, or if adapters that are continued have one.
    pub(super) fn open(
        &self,
        folder: &Path,
        adapters: Option<&Path>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Weights> {
        let known = || match adapters {
            Some(adapters) => Ok(Weights::for_adapters(folder, adapters)?),
            None => Ok(Weights::folder(folder)?),
        };
        let Some(task) = self.task else { return known() };
        if let Some(coefficient) = self.center_rewards.filter(|_| task != TaskOption::Reward) {
            let help = "it is for --task reward: leave it out".into();
            return Err(Error::Option { option: "--center-rewards", got: coefficient.to_string(), help });
        }
        if let (Some(names), TaskOption::Reward) = (&self.labels, task) {
            let help = "a reward is one number, without a name: leave it out".into();
            return Err(Error::Option { option: "--labels", got: names.join(","), help });
        }
        let model = ModelConfig::from_folder(folder)?;
        let of_adapters = adapters.map(Lora::labels_of).transpose()?.flatten();
        if let Some(before) = model.labels.as_ref().or(of_adapters.as_ref()) {
            return self.check_same(task, before).and_then(|()| known());
        }
        let names = match (&self.labels, task) {
            (Some(names), _) => names.clone(),
            (None, TaskOption::Regression | TaskOption::Reward) => vec!["LABEL_0".into()],
            (None, _) => {
                let help = "give the names of its labels, such as --labels ham,spam".into();
                return Err(Error::Option { option: "--task", got: value_name(&task), help });
            }
        };
        let pad_token = models::pad_token(&model, tokenizer);
        Ok(Weights::with_new_head(folder, &LabelsConfig { names, problem: task.problem(), pad_token })?)
    }

    /// Returns the loss of pairs, of a reward model.
    pub(super) fn rewards(&self) -> Option<PreferenceConfig> {
        let centering = self.center_rewards.unwrap_or_default();
        let reward =
            PreferenceConfig { loss: PreferenceLoss::Reward, centering, ..PreferenceConfig::default() };
        (self.task == Some(TaskOption::Reward)).then_some(reward)
    }

    /// Checks that a folder's own head is what is asked for.
    fn check_same(&self, task: TaskOption, before: &LabelsConfig) -> Result<()> {
        let refuse = |option, got, has: String| {
            let help = format!(
                "the model has a head for {has}, which is trained further: leave it out, or give a language model"
            );
            Err(Error::Option { option, got, help })
        };
        let own = TaskOption::value_variants().iter().find(|own| own.problem() == before.problem);
        match &self.labels {
            _ if task == TaskOption::Reward && before.names.len() > 1 => {
                refuse("--task", value_name(&task), format!("{} labels", before.names.len()))
            }
            _ if task.problem() != before.problem => {
                refuse("--task", value_name(&task), own.map(value_name).unwrap_or_default())
            }
            Some(names) if *names != before.names => {
                refuse("--labels", names.join(","), before.names.join(","))
            }
            _ => Ok(()),
        }
    }
}
