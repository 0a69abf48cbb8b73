//! `pretrain`: trains a language model from random weights.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use experiment::error::{Error, Result};
use experiment::options::count;
use models::{ModelConfig, Tokenizer, Weights};
use serde_json::json;

use crate::text::characters;

use super::job::{Job, Subject};
use super::options::TrainOptions;

/// What makes tokens where no folder does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum TokenizerKind {
    /// A token for each byte.
    Bytes,
    /// A token for each character of the text.
    Characters,
}

/// Options of `pretrain`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a language model from random weights on text, on one rank or in any layout (--mesh), and writes
a folder that transformers loads. The model is that of the folder's config.json, or a Llama of the
given sizes. To start, take a text of a few megabytes:

  girandole pretrain --data book.txt --out model --steps 500 --lr 0.001
  girandole generate --model model --prompt \"The \" --temperature 0.8")]
pub struct PretrainOptions {
    /// Folder with config.json [default: a new Llama]
    ///
    /// Of a Llama, Mistral, Qwen2.5, Qwen3 or GPT-2, with its tokenizer.json; that is not needed if --tokenizer is given. Its weights are
    /// not read.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["layers", "hidden", "heads"])]
    model: Option<PathBuf>,
    #[command(flatten)]
    options: TrainOptions,
    /// Tokenizer [default: the folder's, else bytes]
    #[arg(long, value_enum)]
    tokenizer: Option<TokenizerKind>,
    /// Blocks (layers)
    #[arg(long, value_name = "N", default_value = "6", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    layers: usize,
    /// Features of a token
    #[arg(long, value_name = "N", default_value = "384", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    hidden: usize,
    /// Attention heads
    #[arg(long, value_name = "N", default_value = "6", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    heads: usize,
}

/// Tokens per row, and positions, of a model that is not described by a folder.
const LENGTH: usize = 256;

impl PretrainOptions {
    fn made(&self) -> Result<Option<Tokenizer>> {
        Ok(match (self.tokenizer, &self.model) {
            (Some(TokenizerKind::Bytes), _) | (None, None) => Some(Tokenizer::bytes()?),
            (Some(TokenizerKind::Characters), _) => {
                let files = self.options.data.iter().chain(&self.options.evaluate).map(|file| &*file.path);
                Some(characters(files, self.options.field.as_deref())?)
            }
            (None, Some(folder)) if folder.join("tokenizer.json").exists() => {
                Some(Tokenizer::from_folder(folder)?)
            }
            (None, Some(_)) => None,
        })
    }

    fn config(&self, tokenizer: Option<&Tokenizer>) -> Result<ModelConfig> {
        if let Some(folder) = &self.model {
            return Ok(ModelConfig::from_folder(folder)?);
        }
        let Self { layers, hidden, heads, .. } = *self;
        if !hidden.is_multiple_of(2 * heads) {
            let help = format!(
                "give a multiple of {}, twice --heads, so that each head has an even number",
                2 * heads
            );
            return Err(Error::Option { option: "--hidden", got: hidden.to_string(), help });
        }
        let json = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.map_or(257, Tokenizer::len),
            "hidden_size": hidden,
            // Two thirds of 4 * hidden, since the gate adds a third matrix.
            "intermediate_size": (8 * hidden).div_ceil(3).next_multiple_of(32),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": self.options.length.unwrap_or(LENGTH),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": true,
        });
        Ok(ModelConfig::from_json(&json.to_string())?)
    }
}

impl Job for PretrainOptions {
    const NAME: &'static str = "pretrain";

    fn options(&self) -> &TrainOptions {
        &self.options
    }

    fn with_options(&self, options: TrainOptions) -> Self {
        Self { options, ..self.clone() }
    }

    fn subject(&self) -> Result<Subject> {
        let tokenizer = self.made()?;
        let config = self.config(tokenizer.as_ref())?;
        if let Some(tokenizer) = &tokenizer {
            tokenizer.check(&config)?;
        }
        Ok(Subject { weights: Weights::random(&config, self.options.seed)?, lora: None, tokenizer })
    }

    fn folder(&self) -> Option<&Path> {
        self.model.as_deref().filter(|_| self.tokenizer.is_none())
    }
}
