//! `finetune`: trains the model of a Hugging Face folder further, whole or with adapters.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::options::count;
use clap::Args;
use models::{Lora, LoraConfig, Tokenizer, Weights};

use super::job::{Job, Subject};
use super::options::TrainOptions;

/// Options of `finetune`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a Hugging Face model on text, on one rank or in any layout (--mesh), and writes a folder that
transformers loads. With --lora-rank only small matrices beside the linear layers are trained; they are
saved in the format of peft, or merged into the weights (--merge). JSON lines with `messages` are
rendered with the folder's chat template, and only the assistant's answers are trained on.

  girandole finetune --model SmolLM2-135M --data chats.jsonl --out tuned --lora-rank 16")]
pub struct FinetuneOptions {
    /// Hugging Face folder of the model
    ///
    /// A folder with config.json, safetensors and tokenizer.json, as transformers writes it: a Llama, Mistral, Mixtral, Qwen2.5, Qwen3, DeepSeek V3 or GPT-2.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    options: TrainOptions,
    /// Rank of adapters (LoRA) [default: no adapters]
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Adapters")]
    lora_rank: Option<usize>,
    /// Alpha of adapters [default: twice the rank]
    ///
    /// Adapters are scaled by alpha / rank.
    #[arg(long, value_name = "A", value_parser = finite, requires = "lora_rank", help_heading = "Adapters")]
    lora_alpha: Option<f64>,
    /// Layers with adapters
    ///
    /// The ends of their names, such as q_proj; all-linear stands for all linear layers but the output.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "all-linear",
        requires = "lora_rank",
        help_heading = "Adapters"
    )]
    lora_targets: Vec<String>,
    /// Probability of dropout before adapters
    #[arg(
        long,
        value_name = "P",
        default_value = "0",
        value_parser = crate::options::probability,
        requires = "lora_rank",
        help_heading = "Adapters"
    )]
    lora_dropout: f64,
    /// Folder of adapters to continue with
    ///
    /// It has an adapter_config.json.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["lora_rank", "lora_alpha", "lora_targets", "lora_dropout"], help_heading = "Adapters")]
    adapters: Option<PathBuf>,
    /// Save the whole model, with adapters merged into it
    #[arg(long, help_heading = "Adapters")]
    merge: bool,
}

impl FinetuneOptions {
    fn lora(&self, weights: &Weights) -> Result<Option<Lora>> {
        if let Some(folder) = &self.adapters {
            return Ok(Some(Lora::from_folder(folder, weights.config())?));
        }
        let Some(rank) = self.lora_rank else {
            if self.merge {
                let help = "there are no adapters to merge: give --lora-rank or --adapters".into();
                return Err(Error::Option { option: "--merge", got: "true".into(), help });
            }
            return Ok(None);
        };
        let alpha = self.lora_alpha.unwrap_or(2.0 * rank as f64);
        let (targets, dropout) = (self.lora_targets.clone(), self.lora_dropout);
        let config = LoraConfig { rank, alpha, targets, dropout, ..LoraConfig::default() };
        Ok(Some(Lora::new(&config, weights.config())?))
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
        let mut weights = Weights::folder(&self.model)?.with_seed(self.options.seed);
        let lora = self.lora(&weights)?.map(|lora| lora.of_folder(&self.model));
        if let (Some(folder), Some(lora)) = (&self.adapters, &lora) {
            weights = weights.with_adapters(folder, lora)?;
        }
        let tokenizer = match self.model.join("tokenizer.json").exists() {
            true => Some(Tokenizer::from_folder(&self.model)?),
            // Token files need no tokenizer.
            false => None,
        };
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check(weights.config())?;
        }
        Ok(Subject { weights, lora, tokenizer })
    }

    fn merges(&self) -> bool {
        self.merge
    }

    fn saves_adapters(&self) -> bool {
        (self.lora_rank.is_some() || self.adapters.is_some()) && !self.merge
    }

    fn model(&self) -> Option<&Path> {
        Some(&self.model)
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.model)
    }
}

fn finite(text: &str) -> std::result::Result<f64, &'static str> {
    text.parse().ok().filter(|number: &f64| number.is_finite()).ok_or("give a finite number")
}
