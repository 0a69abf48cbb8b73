//! `prefer`: trains the model of a Hugging Face folder on pairs of answers, of which one is preferred.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use models::tokens::NamedTemplate;
use models::{Tokenizer, Weights};
use ops::{PreferenceConfig, PreferenceLoss};

use super::FinetuneOptions;
use super::job::{Job, Subject};
use super::options::TrainOptions;
use super::pairs;
use crate::error::{Error, Result};
use crate::options::value_name;

/// The loss of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LossOption {
    /// DPO.
    Dpo,
    /// IPO.
    Ipo,
    /// Hinge, as in SLiC.
    Hinge,
    /// ORPO.
    Orpo,
    /// SimPO.
    Simpo,
}

impl LossOption {
    fn loss(self) -> PreferenceLoss {
        match self {
            Self::Dpo => PreferenceLoss::Dpo,
            Self::Ipo => PreferenceLoss::Ipo,
            Self::Hinge => PreferenceLoss::Hinge,
            Self::Orpo => PreferenceLoss::Orpo,
            Self::Simpo => PreferenceLoss::SimPo,
        }
    }
}

/// Options of `prefer`.
#[derive(Debug, Clone, Args)]
// Of heads for labels, which `finetune` trains: they are refused.
#[command(mut_arg("task", |arg| arg.hide(true)), mut_arg("labels", |arg| arg.hide(true)))]
#[command(mut_arg("center_rewards", |arg| arg.hide(true)))]
#[command(after_help = "\
Trains a Hugging Face model on pairs of answers, JSON lines with `chosen`, `rejected` and usually
`prompt`, so that it prefers the chosen ones; in any layout (--mesh), whole or with adapters, as
`finetune` does.

  girandole prefer --model tuned --data pairs.jsonl --out better --lora-rank 8")]
pub struct PreferOptions {
    #[command(flatten)]
    finetune: FinetuneOptions,
    /// Loss: dpo, ipo, hinge, orpo or simpo
    ///
    /// `dpo`, `ipo` and `hinge` compare with a reference model; `orpo` and `simpo` need none.
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        default_value = "dpo",
        hide_possible_values = true,
        help_heading = "Preferences"
    )]
    loss: LossOption,
    /// Beta of the loss
    #[arg(long, value_name = "B", default_value = "0.1", value_parser = beta, help_heading = "Preferences", allow_negative_numbers = true)]
    beta: f64,
    /// Share of labels taken as wrong, for dpo and simpo [default: 0]
    #[arg(long, value_name = "P", value_parser = label_smoothing, help_heading = "Preferences", allow_negative_numbers = true)]
    label_smoothing: Option<f64>,
    /// Margin that simpo asks for [default: 0.5]
    #[arg(long, value_name = "G", value_parser = gamma, help_heading = "Preferences", allow_negative_numbers = true)]
    simpo_gamma: Option<f64>,
    /// Folder of the reference model [default: --model]
    ///
    /// By default the model as --model has it, without adapters. Its log-probabilities are computed once, before training, and kept in
    /// checkpoints.
    #[arg(long, value_name = "DIR", help_heading = "Preferences")]
    reference: Option<PathBuf>,
}

impl PreferOptions {
    fn config(&self) -> PreferenceConfig {
        let default = PreferenceConfig::default();
        PreferenceConfig {
            loss: self.loss.loss(),
            beta: self.beta,
            label_smoothing: self.label_smoothing.unwrap_or(default.label_smoothing),
            simpo_gamma: self.simpo_gamma.unwrap_or(default.simpo_gamma),
            ..default
        }
    }

    /// Refuses options that the loss or pairs have no use for.
    fn check_use(&self) -> Result<()> {
        let refuse = |option, got: String, help: &str| Err(Error::Option { option, got, help: help.into() });
        let (loss, options) = (self.loss.loss(), &self.finetune.options);
        if let Some(folder) = self.reference.as_ref().filter(|_| !loss.needs_reference()) {
            let help = "orpo and simpo compare with no reference: leave it out, or give another --loss";
            return refuse("--reference", folder.display().to_string(), help);
        }
        let is_smoothed = matches!(loss, PreferenceLoss::Dpo | PreferenceLoss::SimPo);
        if let Some(share) = self.label_smoothing.filter(|_| !is_smoothed) {
            return refuse(
                "--label-smoothing",
                share.to_string(),
                "it is for --loss dpo and simpo: leave it out",
            );
        }
        if let Some(gamma) = self.simpo_gamma.filter(|_| loss != PreferenceLoss::SimPo) {
            return refuse("--simpo-gamma", gamma.to_string(), "it is for --loss simpo: leave it out");
        }
        pairs::check_options(options)
    }

    /// Checks that a reference knows the same tokens.
    fn check_reference(&self, folder: &Path, reference: &Weights) -> Result<()> {
        let model = Weights::folder(&self.finetune.model)?;
        let refuse = |help: String| {
            Err(Error::Option { option: "--reference", got: folder.display().to_string(), help })
        };
        if reference.config().labels.is_some() {
            return refuse("it labels documents: give a language model".into());
        }
        let [own, other] = [&model, reference].map(|weights| weights.config().vocab_size);
        if Tokenizer::is_in(&self.finetune.model)? && Tokenizer::is_in(folder)? {
            let [model, reference] = [&*self.finetune.model, folder].map(Tokenizer::from_folder);
            if !model?.has_same_tokens(&reference?) {
                return refuse(
                    "its tokenizer has other tokens than that of --model: give one of the same".into(),
                );
            }
        } else if own != other {
            return refuse(format!(
                "it has {other} tokens, and --model has {own}: give one of the same vocabulary"
            ));
        }
        Ok(())
    }
}

impl Job for PreferOptions {
    const NAME: &'static str = "prefer";

    fn options(&self) -> &TrainOptions {
        self.finetune.options()
    }

    fn with_options(&self, options: TrainOptions) -> Self {
        Self { finetune: self.finetune.with_options(options), ..self.clone() }
    }

    fn subject(&self) -> Result<Subject> {
        self.check_use()?;
        let subject = self.finetune.subject()?;
        if let Some(labels) = &subject.weights.config().labels {
            let got = format!("a model that labels documents ({})", labels.names.join(", "));
            let help =
                "pairs are of answers that a model writes: give a language model, without options for labels";
            return Err(Error::Option { option: "--model", got, help: help.into() });
        }
        Ok(subject)
    }

    fn chat_template(&self) -> Result<Option<NamedTemplate>> {
        self.finetune.chat_template()
    }

    fn merges(&self) -> bool {
        self.finetune.merges()
    }

    fn saves_adapters(&self) -> bool {
        self.finetune.saves_adapters()
    }

    fn preferences(&self) -> Option<PreferenceConfig> {
        Some(self.config())
    }

    fn reference(&self) -> Result<Option<Subject>> {
        if !self.loss.loss().needs_reference() {
            return Ok(None);
        }
        let folder = self.reference.as_deref().unwrap_or(&self.finetune.model);
        let weights = Weights::folder(folder)?;
        let lora = match &self.reference {
            Some(folder) => {
                self.check_reference(folder, &weights)?;
                None
            }
            // New adapters add nothing; a quantized base is what they are beside.
            None => self.finetune.lora(&weights)?.filter(|lora| lora.base_format().is_some()),
        };
        Ok(Some(Subject { weights, lora, tokenizer: None }))
    }

    fn other_reference(&self) -> Result<Option<Weights>> {
        Ok(self.reference.as_deref().map(Weights::folder).transpose()?)
    }

    fn settings(&self) -> Vec<(String, String)> {
        let config = self.config();
        // Another one is told by its weights.
        let is_model = config.loss.needs_reference() && self.reference.is_none();
        let reference = is_model.then(|| ("--reference".to_string(), "--model".to_string()));
        let all = [
            ("--loss", value_name(&self.loss)),
            ("--beta", config.beta.to_string()),
            ("--label-smoothing", config.label_smoothing.to_string()),
            ("--simpo-gamma", config.simpo_gamma.to_string()),
        ];
        all.map(|(name, value)| (name.to_string(), value)).into_iter().chain(reference).collect()
    }

    fn model(&self) -> Option<&Path> {
        Job::model(&self.finetune)
    }

    fn folder(&self) -> Option<&Path> {
        self.finetune.folder()
    }
}

fn number(text: &str, fits: impl Fn(f64) -> bool) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && fits(*number))
}

fn beta(text: &str) -> std::result::Result<f64, &'static str> {
    number(text, |beta| beta > 0.0).ok_or("give a number above 0, such as 0.1")
}

fn label_smoothing(text: &str) -> std::result::Result<f64, &'static str> {
    number(text, |share| (0.0..0.5).contains(&share)).ok_or("give a number from 0 to below 0.5")
}

fn gamma(text: &str) -> std::result::Result<f64, &'static str> {
    number(text, |gamma| gamma >= 0.0).ok_or("give a number, 0 or more")
}
