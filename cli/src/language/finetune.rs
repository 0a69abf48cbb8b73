//! `finetune`: trains the model of a Hugging Face folder further, whole or with adapters.

use std::path::{Path, PathBuf};

use crate::error::Result;
use clap::Args;
use models::tokens::NamedTemplate;
use models::{Lora, Tokenizer, Weights};
use ops::PreferenceConfig;

use super::adapters::AdapterOptions;
use super::job::{Job, Subject};
use super::labels::LabelOptions;
use super::options::TrainOptions;
use super::pairs;

/// Options of `finetune`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a Hugging Face model on text, on one rank or in any layout (--mesh), and writes a folder that
transformers loads. With --lora-rank only small matrices beside the linear layers are trained; they are
saved in the format of peft, or merged into the weights (--merge). JSON lines with `messages` are
rendered with the folder's chat template, and only the assistant's answers are trained on. With --task
the model labels documents: lines have a `label` beside `text`, `messages` or `prompt`; or it learns
rewards from pairs, `chosen` and `rejected` (--task reward).

  girandole finetune --model SmolLM2-135M --data chats.jsonl --out tuned --lora-rank 16")]
pub struct FinetuneOptions {
    /// Hugging Face folder of the model, or GGUF file
    ///
    /// A folder with config.json, safetensors and tokenizer.json, as transformers writes it: a Llama, Mistral, Mixtral, Qwen2.5, Qwen3, DeepSeek V3 or GPT-2.
    /// Or a GGUF file of one of them but DeepSeek; beside quantized weights, also of bitsandbytes, adapters are trained.
    #[arg(long, value_name = "DIR")]
    pub(super) model: PathBuf,
    #[command(flatten)]
    pub(super) options: TrainOptions,
    /// What the model's head is for.
    #[command(flatten)]
    labels: LabelOptions,
    #[command(flatten)]
    adapters: AdapterOptions,
}

impl FinetuneOptions {
    /// Returns the adapters for a model; `None` if all of it is trained.
    pub(super) fn lora(&self, weights: &Weights) -> Result<Option<Lora>> {
        self.adapters.lora(weights, &self.options)
    }
}

impl Job for FinetuneOptions {
    const NAME: &'static str = "finetune";

    fn options(&self) -> &TrainOptions {
        &self.options
    }

    fn with_options(&self, options: TrainOptions) -> Self {
        Self { options, ..self.clone() }
    }

    fn subject(&self) -> Result<Subject> {
        if self.labels.rewards().is_some() {
            pairs::check_options(&self.options)?;
        }
        let tokenizer = match Tokenizer::is_in(&self.model)? {
            true => Some(Tokenizer::from_folder(&self.model)?),
            // Token files need no tokenizer.
            false => None,
        };
        let adapters = self.adapters.adapters.as_deref();
        let weights = self.labels.open(&self.model, adapters, tokenizer.as_ref())?;
        let mut weights = weights.with_seed(self.options.seed);
        let lora = self.lora(&weights)?.map(|lora| lora.of_folder(&self.model));
        if let (Some(folder), Some(lora)) = (&self.adapters.adapters, &lora) {
            weights = weights.with_adapters(folder, lora)?;
        }
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check(weights.config())?;
        }
        Ok(Subject { weights, lora, tokenizer })
    }

    fn chat_template(&self) -> Result<Option<NamedTemplate>> {
        let named = self.options.chat_template.as_ref();
        Ok(NamedTemplate::chosen(named, self.adapters.adapters.as_deref())?)
    }

    fn merges(&self) -> bool {
        self.adapters.merge
    }

    fn saves_adapters(&self) -> bool {
        self.adapters.saves_adapters()
    }

    fn preferences(&self) -> Option<PreferenceConfig> {
        self.labels.rewards()
    }

    fn settings(&self) -> Vec<(String, String)> {
        let of = |rewards: PreferenceConfig| ("--center-rewards".to_string(), rewards.centering.to_string());
        self.labels.rewards().map(of).into_iter().collect()
    }

    fn model(&self) -> Option<&Path> {
        Some(&self.model)
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.model)
    }
}
