//! `--task` and `--labels`: a head that scores documents in place of one that predicts tokens.

use std::path::Path;

use clap::{Args, ValueEnum};
use models::{LabelsConfig, ModelConfig, Problem, Tokenizer, Weights};

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
}

impl TaskOption {
    fn problem(self) -> Problem {
        match self {
            Self::SingleLabel => Problem::SingleLabel,
            Self::MultiLabel => Problem::MultiLabel,
            Self::Regression => Problem::Regression,
        }
    }
}

/// The head of `finetune`.
#[derive(Debug, Clone, Args)]
pub(super) struct LabelOptions {
    /// Label documents in place of writing [default: folder's]
    ///
    /// The model gets a new head, drawn from --seed, that scores each document as a whole, by its last token; the data's lines
    /// then have a `label` beside their text. A folder whose model scores documents already is trained further without this
    /// option.
    #[arg(long, value_name = "TASK", value_enum, help_heading = "Training")]
    task: Option<TaskOption>,
    /// Names of the labels, such as ham,spam
    ///
    /// Their order is that of their numbers, from 0. A regression needs none for a single number.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "task", help_heading = "Training")]
    labels: Option<Vec<String>>,
}

impl LabelOptions {
    /// Opens the weights of a folder, with a new head if that is asked for.
    pub(super) fn open(&self, folder: &Path, tokenizer: Option<&Tokenizer>) -> Result<Weights> {
        let Some(task) = self.task else { return Ok(Weights::folder(folder)?) };
        let model = ModelConfig::from_folder(folder)?;
        if let Some(before) = &model.labels {
            return self.check_same(task, before).and_then(|()| Ok(Weights::folder(folder)?));
        }
        let names = match (&self.labels, task) {
            (Some(names), _) => names.clone(),
            (None, TaskOption::Regression) => vec!["LABEL_0".into()],
            (None, _) => {
                let help = "give the names of its labels, such as --labels ham,spam".into();
                return Err(Error::Option { option: "--task", got: value_name(&task), help });
            }
        };
        let pad_token = pad_token(&model, tokenizer);
        Ok(Weights::with_new_head(folder, &LabelsConfig { names, problem: task.problem(), pad_token })?)
    }

    /// Checks that a folder's own head is what is asked for.
    fn check_same(&self, task: TaskOption, before: &LabelsConfig) -> Result<()> {
        let refuse = |option, got, has: String| {
            let help = format!(
                "the folder's model has a head for {has}, which is trained further: leave it out, or give a language model"
            );
            Err(Error::Option { option, got, help })
        };
        let own = TaskOption::value_variants().iter().find(|own| own.problem() == before.problem);
        match &self.labels {
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

/// Returns the token by which other programs fill up rows with this model: its own, or else the one that ends a text, as TRL does.
fn pad_token(model: &ModelConfig, tokenizer: Option<&Tokenizer>) -> Option<u32> {
    let own = model.json().get("pad_token_id").and_then(serde_json::Value::as_u64);
    own.map(|token| token as u32).or_else(|| tokenizer?.end_of_text())
}
