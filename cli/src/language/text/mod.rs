//! `generate`, `chat`, `evaluate`, `export` and `tokenize`: using a language model of a Hugging Face folder, writing it in other
//! formats, and converting text to tokens.

mod chat;
mod evaluate;
mod export;
mod generate;
mod layout;
mod sampling;
mod tokenize;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::PrecisionOption;
use candle_core::DType;
use clap::{Args, ValueEnum};
use models::tokens::{NamedTemplate, Piece, TextSource};
use models::{CausalLm, Lora, Tokenizer, Weights};
use training::build::Builder;

pub use chat::ChatOptions;
pub use evaluate::EvaluateOptions;
pub use export::ExportOptions;
pub use generate::GenerateOptions;
pub use tokenize::TokenizeOptions;

/// What the model's weights are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WeightsDtype {
    /// 4 bytes a parameter.
    F32,
    /// 2 bytes a parameter.
    Bf16,
}

/// Options of `generate` and `evaluate`.
#[derive(Debug, Clone, Args)]
struct ModelOptions {
    /// Hugging Face folder of the model, or GGUF file
    ///
    /// A folder with config.json, safetensors and tokenizer.json, as transformers writes it: a Llama, Mistral, Mixtral, Qwen2.5, Qwen3, DeepSeek V3 or GPT-2.
    /// Or a GGUF file of one of them but DeepSeek, as `export` and llama.cpp write it; quantized weights, also of bitsandbytes, are widened.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Adapters (LoRA): a folder that finetune --lora-rank or peft wrote
    #[arg(long, value_name = "DIR")]
    adapters: Option<PathBuf>,
    /// Template: chatml, or FILE [default: folder's]
    ///
    /// A file in Jinja, for conversations with a model whose folder has no template, or another one. Without it, that of
    /// the adapters' folder is taken before the model's.
    #[arg(long, value_name = "FILE")]
    chat_template: Option<NamedTemplate>,
    /// Type of weights
    #[arg(long, value_enum, default_value = "f32")]
    dtype: WeightsDtype,
    /// Precision of f32 matrix products
    #[arg(long, value_enum, default_value = "f32")]
    precision: PrecisionOption,
}

/// An opened model folder.
struct OpenedModel {
    tokenizer: Tokenizer,
    weights: Weights,
    lora: Option<Lora>,
}

impl ModelOptions {
    fn dtype(&self) -> DType {
        match self.dtype {
            WeightsDtype::F32 => DType::F32,
            WeightsDtype::Bf16 => DType::BF16,
        }
    }

    /// Returns the precision of products: that of the weights, where they have 16 bits.
    fn products(&self) -> PrecisionOption {
        match self.dtype {
            WeightsDtype::F32 => self.precision,
            WeightsDtype::Bf16 => PrecisionOption::Bf16,
        }
    }

    /// Returns the chat template to use in place of that of the model's folder, if any.
    fn chat_template(&self) -> Result<Option<NamedTemplate>> {
        Ok(NamedTemplate::chosen(self.chat_template.as_ref(), self.adapters.as_deref())?)
    }

    fn open(&self) -> Result<OpenedModel> {
        let tokenizer = Tokenizer::from_folder(&self.model)?;
        let folder = self.adapters.as_deref();
        let mut weights = match folder {
            Some(adapters) => Weights::for_adapters(&self.model, adapters)?,
            None => Weights::folder(&self.model)?,
        };
        tokenizer.check(weights.config())?;
        let lora = folder.map(|folder| Lora::from_folder(folder, weights.config())).transpose()?;
        if let Some((folder, lora)) = folder.zip(lora.as_ref()) {
            weights = weights.with_adapters(folder, lora)?;
        }
        Ok(OpenedModel { tokenizer, weights, lora })
    }
}

impl OpenedModel {
    /// Refuses a model that writes no text.
    fn check_writes(&self, folder: &Path) -> Result<()> {
        let Some(labels) = &self.weights.config().labels else { return Ok(()) };
        let help = format!(
            "its model labels documents ({}), and writes no text: `girandole evaluate` measures it",
            labels.names.join(", ")
        );
        Err(Error::Option { option: "--model", got: folder.display().to_string(), help })
    }

    /// Says what of the model is taken otherwise than one may expect.
    fn say_notes(&self) {
        self.weights.config().notes().iter().for_each(|line| note(format_args!("{line}")));
    }

    fn build(&self, builder: &Builder) -> candle_core::Result<CausalLm> {
        match &self.lora {
            Some(lora) => CausalLm::new(self.weights.config(), &lora.adapt(builder.clone())),
            None => CausalLm::new(self.weights.config(), builder),
        }
    }
}

/// Returns a tokenizer with one token for each character that occurs in these files.
pub(crate) fn characters<'a>(
    files: impl Iterator<Item = &'a Path>,
    field: Option<&str>,
) -> Result<Tokenizer> {
    let mut all = BTreeSet::new();
    for path in files {
        let mut source = TextSource::open(path, field)?;
        while let Some(piece) = source.next_piece()? {
            match piece {
                Piece::Text { text, .. } => all.extend(text.chars()),
                Piece::Completion { prompt, completion } => {
                    all.extend(prompt.chars().chain(completion.chars()))
                }
                _ => {}
            }
        }
    }
    Ok(Tokenizer::characters(&all.into_iter().collect::<String>())?)
}
