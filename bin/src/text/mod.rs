//! `generate`, `evaluate` and `tokenize`: what a language model of a Hugging Face folder writes, how well it predicts a text, and text
//! to tokens.

mod evaluate;
mod generate;
mod tokenize;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use clap::{Args, ValueEnum};
use models::{CausalLm, Tokenizer, Weights};
use training::build::Builder;

pub use evaluate::EvaluateOptions;
pub use generate::GenerateOptions;
pub use tokenize::{MadeTokenizer, TokenizeOptions};

use crate::error::{Error, Result};
use crate::options::PrecisionOption;

/// What the model's weights are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightsDtype {
    /// 4 bytes a parameter.
    F32,
    /// 2 bytes a parameter.
    Bf16,
}

/// Options of `generate` and `evaluate`.
#[derive(Debug, Clone, Args)]
pub struct ModelOptions {
    /// Folder with config.json, safetensors and tokenizer.json, as transformers writes it: Llama, Mistral, Qwen2.5, Qwen3 or GPT-2
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What weights are kept in
    #[arg(long, value_enum, default_value = "f32")]
    dtype: WeightsDtype,
    /// How exactly matrix products of f32 are computed
    #[arg(long, value_enum, default_value = "f32")]
    precision: PrecisionOption,
}

impl ModelOptions {
    /// Runs `f` with the model and its tokenizer.
    fn run<R>(&self, f: impl FnOnce(&CausalLm, &Tokenizer) -> Result<R>) -> Result<R> {
        let tokenizer = Tokenizer::from_folder(&self.model)?;
        let weights = Weights::folder(&self.model)?;
        tokenizer.check(weights.config())?;
        let dtype = match self.dtype {
            WeightsDtype::F32 => DType::F32,
            WeightsDtype::Bf16 => DType::BF16,
        };
        let builder = Builder::new(weights.tensors(dtype, &Device::Cpu));
        let model = CausalLm::new(weights.config(), &builder)?;
        training::autocast(self.precision.into(), || f(&model, &tokenizer))
    }
}

/// The text of a file.
pub(crate) fn read_text(option: &'static str, path: &Path) -> Result<String> {
    let refuse = |help: String| Error::Option { option, got: path.display().to_string(), help };
    let bytes = training::read_input(path).map_err(|error| refuse(format!("it cannot be read: {error}")))?;
    String::from_utf8(bytes).map_err(|error| {
        refuse(format!("it is no text in UTF-8 from byte {} on", error.utf8_error().valid_up_to()))
    })
}
