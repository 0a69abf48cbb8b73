//! `finetune`: trains the model of a Hugging Face folder further, whole or with adapters.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::options::count;
use clap::Args;
use models::{Lora, LoraConfig, ModelConfig, Tokenizer, Weights};
use ops::nf4::BLOCK;

use super::job::{Job, Subject};
use super::labels::LabelOptions;
use super::options::TrainOptions;

/// Options of `finetune`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a Hugging Face model on text, on one rank or in any layout (--mesh), and writes a folder that
transformers loads. With --lora-rank only small matrices beside the linear layers are trained; they are
saved in the format of peft, or merged into the weights (--merge). JSON lines with `messages` are
rendered with the folder's chat template, and only the assistant's answers are trained on. With --task
the model labels documents: lines have a `label` beside `text`, `messages` or `prompt`.

  girandole finetune --model SmolLM2-135M --data chats.jsonl --out tuned --lora-rank 16")]
pub struct FinetuneOptions {
    /// Hugging Face folder of the model
    ///
    /// A folder with config.json, safetensors and tokenizer.json, as transformers writes it: a Llama, Mistral, Mixtral, Qwen2.5, Qwen3, DeepSeek V3 or GPT-2.
    #[arg(long, value_name = "DIR")]
    pub(super) model: PathBuf,
    #[command(flatten)]
    pub(super) options: TrainOptions,
    /// What the model's head is for.
    #[command(flatten)]
    labels: LabelOptions,
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
    /// Bits of the base's weights: 4 [default: all]
    ///
    /// The weights of the blocks' linear layers are quantized while they are read, in the format of QLoRA (NF4 with double
    /// quantization, as bitsandbytes); embedding, output, norms and biases are not. Adapters are trained beside them. With --merge
    /// they are merged into the weights as 4 bits hold them.
    #[arg(long, value_name = "BITS", value_parser = base_bits, help_heading = "Adapters")]
    base_bits: Option<u8>,
}

impl FinetuneOptions {
    pub(super) fn lora(&self, weights: &Weights) -> Result<Option<Lora>> {
        let is_adapted = self.lora_rank.is_some() || self.adapters.is_some();
        if let Some(labels) = weights.config().labels.as_ref().filter(|_| is_adapted) {
            let option = if self.adapters.is_some() { "--adapters" } else { "--lora-rank" };
            let got = format!("a model that labels documents ({})", labels.names.join(", "));
            let help = "beside adapters its head would stay as it is, so far: leave the option out, and the whole model is trained";
            return Err(Error::Option { option, got, help: help.into() });
        }
        match (self.adapters_of(weights)?, self.base_bits) {
            (lora, None) => Ok(lora),
            (Some(lora), Some(_)) => {
                self.check_base_in_4_bits(weights.config())?;
                Ok(Some(lora.in_4_bits()?))
            }
            (None, Some(bits)) => {
                let help = "a base in 4 bits is not trained itself: give --lora-rank or --adapters, which are, or leave it out";
                Err(Error::Option { option: "--base-bits", got: bits.to_string(), help: help.into() })
            }
        }
    }

    /// Refuses what a base in 4 bits cannot be divided over or computed on.
    fn check_base_in_4_bits(&self, model: &ModelConfig) -> Result<()> {
        let refuse = |option, got: String, help: String| Err(Error::Option { option, got, help });
        if !self.options.common().device()?.is_cpu() {
            let help = "a base in 4 bits is computed on a CPU only, so far: leave out --base-bits, or give --device cpu";
            return refuse("--base-bits", "4".into(), help.into());
        }
        let Some(layout) = &self.options.mesh else { return Ok(()) };
        let widths = [model.num_heads * model.head_dim, model.intermediate_size];
        match widths.into_iter().find(|width| !(width / BLOCK).is_multiple_of(layout.tp)) {
            None => Ok(()),
            Some(width) => {
                let (blocks, tp) = (width / BLOCK, layout.tp);
                let help = format!(
                    "a width of {width} in 4 bits is {blocks} blocks of {BLOCK}, which cannot be divided over tp={tp} ranks"
                );
                refuse("--mesh", layout.to_string(), help)
            }
        }
    }

    fn adapters_of(&self, weights: &Weights) -> Result<Option<Lora>> {
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
        let tokenizer = match self.model.join("tokenizer.json").exists() {
            true => Some(Tokenizer::from_folder(&self.model)?),
            // Token files need no tokenizer.
            false => None,
        };
        let mut weights = self.labels.open(&self.model, tokenizer.as_ref())?.with_seed(self.options.seed);
        let lora = self.lora(&weights)?.map(|lora| lora.of_folder(&self.model));
        if let (Some(folder), Some(lora)) = (&self.adapters, &lora) {
            weights = weights.with_adapters(folder, lora)?;
        }
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

fn base_bits(text: &str) -> std::result::Result<u8, &'static str> {
    if text == "4" { Ok(4) } else { Err("give 4, or leave it out") }
}

fn finite(text: &str) -> std::result::Result<f64, &'static str> {
    text.parse().ok().filter(|number: &f64| number.is_finite()).ok_or("give a finite number")
}
