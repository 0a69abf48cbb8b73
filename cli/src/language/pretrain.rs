//! `pretrain`: trains a language model from random weights.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::options::count;
use clap::{Args, ValueEnum};
use models::{ModelConfig, Tokenizer, Weights};
use serde_json::{Map, Value, json};

use crate::language::text::characters;

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
    /// Of a Llama, Mistral, Mixtral, Qwen2.5, Qwen3, DeepSeek V3 or GPT-2, with its tokenizer.json; that is not needed if --tokenizer is given. Its weights are
    /// not read.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["layers", "hidden", "heads"])]
    model: Option<PathBuf>,
    #[command(flatten)]
    options: TrainOptions,
    /// Tokenizer [default: the folder's, else bytes]
    #[arg(long, value_enum)]
    tokenizer: Option<TokenizerKind>,
    /// Blocks (layers)
    #[arg(long, value_name = "N", default_value = "6", value_parser = count, help_heading = "Model")]
    layers: usize,
    /// Features of a token
    #[arg(long, value_name = "N", default_value = "384", value_parser = count, help_heading = "Model")]
    hidden: usize,
    /// Attention heads
    #[arg(long, value_name = "N", default_value = "6", value_parser = count, help_heading = "Model")]
    heads: usize,
}

/// Maximum of each size of a model that is not described by a folder.
const MOST: usize = 1 << 31;
/// Tokens per row, and positions, of a model that is not described by a folder.
const LENGTH: usize = 256;

impl PretrainOptions {
    fn made(&self) -> Result<Option<Tokenizer>> {
        Ok(match (self.tokenizer, &self.model) {
            (Some(TokenizerKind::Bytes), _) | (None, None) => Some(Tokenizer::bytes()?),
            (Some(TokenizerKind::Characters), _) => {
                if self.options.text_files().any(|(_, path)| path == Path::new("-")) {
                    let help = "it is made of the files' characters on each rank, which standard input does not reach: give a file".into();
                    return Err(Error::Option { option: "--tokenizer", got: "characters".into(), help });
                }
                let files = self.options.data.iter().chain(&self.options.evaluate).map(|file| &*file.path);
                Some(characters(files, self.options.field.as_deref())?)
            }
            (None, Some(folder)) if Tokenizer::is_in(folder)? => Some(Tokenizer::from_folder(folder)?),
            (None, Some(_)) => None,
        })
    }

    /// Returns the model's configuration. It names the special tokens of a newly made tokenizer: other ids, or
    /// transformers' defaults, are ordinary tokens of it.
    fn config(&self, tokenizer: Option<&Tokenizer>) -> Result<ModelConfig> {
        let mut json = match &self.model {
            Some(folder) if self.tokenizer.is_none() => return Ok(ModelConfig::from_folder(folder)?),
            Some(folder) => ModelConfig::from_folder(folder)?.json().clone(),
            None => self.llama(tokenizer)?,
        };
        json.insert("eos_token_id".into(), json!(tokenizer.and_then(Tokenizer::end_of_text)));
        json.extend(["bos_token_id", "pad_token_id"].map(|name| (name.to_string(), Value::Null)));
        Ok(ModelConfig::from_json(&Value::Object(json).to_string())?)
    }

    /// Returns the `config.json` of a new Llama.
    fn llama(&self, tokenizer: Option<&Tokenizer>) -> Result<Map<String, Value>> {
        let Self { layers, hidden, heads, .. } = *self;
        for (option, size) in [("--layers", layers), ("--hidden", hidden), ("--heads", heads)] {
            if size > MOST {
                return Err(Error::Option {
                    option,
                    got: size.to_string(),
                    help: format!("give at most {MOST}"),
                });
            }
        }
        if !hidden.is_multiple_of(2 * heads) {
            let help = format!(
                "give a multiple of {}, twice --heads, so that each head has an even number",
                2 * heads
            );
            return Err(Error::Option { option: "--hidden", got: hidden.to_string(), help });
        }
        let fields = [
            ("architectures", json!(["LlamaForCausalLM"])),
            ("model_type", json!("llama")),
            ("vocab_size", json!(tokenizer.map_or(257, Tokenizer::len))),
            ("hidden_size", json!(hidden)),
            // Two thirds of 4 * hidden, since the gate adds a third matrix.
            ("intermediate_size", json!((8 * hidden).div_ceil(3).next_multiple_of(32))),
            ("num_hidden_layers", json!(layers)),
            ("num_attention_heads", json!(heads)),
            ("num_key_value_heads", json!(heads)),
            ("max_position_embeddings", json!(self.options.length.unwrap_or(LENGTH))),
            ("hidden_act", json!("silu")),
            ("rms_norm_eps", json!(1e-5)),
            ("rope_theta", json!(10000.0)),
            ("initializer_range", json!(0.02)),
            ("tie_word_embeddings", json!(true)),
        ];
        Ok(fields.map(|(name, value)| (name.to_string(), value)).into_iter().collect())
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

    fn model(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    fn folder(&self) -> Option<&Path> {
        self.model.as_deref().filter(|_| self.tokenizer.is_none())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        options: PretrainOptions,
    }

    #[test]
    fn special_tokens_are_those_of_the_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        let config = |more: &[&str]| {
            let common = ["pretrain", "--data", "text.txt", "--out", "out"];
            let options = Program::parse_from(common.iter().chain(more)).options;
            let tokenizer = options.made().unwrap();
            options.config(tokenizer.as_ref()).unwrap().json().clone()
        };
        let mut json = config(&[]);
        assert_eq!((&json["eos_token_id"], &json["bos_token_id"]), (&json!(256), &Value::Null));
        json.extend(
            ["bos_token_id", "eos_token_id", "pad_token_id"].map(|name| (name.to_string(), json!(2))),
        );
        std::fs::write(folder.path().join("config.json"), Value::Object(json).to_string()).unwrap();
        let model = folder.path().to_str().unwrap();
        assert_eq!(config(&["--model", model])["eos_token_id"], json!(2));
        let json = config(&["--model", model, "--tokenizer", "bytes"]);
        assert_eq!((&json["eos_token_id"], &json["pad_token_id"]), (&json!(256), &Value::Null));
    }
}
