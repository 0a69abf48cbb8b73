//! `evaluate`: how well a model predicts a text.

use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use clap::Args;
use models::{CausalLm, Tokenizer};

use super::{ModelOptions, read_text};
use crate::console::say;
use crate::error::{Error, Result};
use crate::options::count;

/// Options of `evaluate`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints the mean cross-entropy of a text's tokens, in nats, and its exponential, the perplexity. The
text is cut into rows of --length tokens; each token but the first is predicted once, from those of
its row before it.")]
pub struct EvaluateOptions {
    #[command(flatten)]
    model: ModelOptions,
    /// File with the text
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Tokens of a row [default: 1024, or as many as the model has positions]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    length: Option<usize>,
}

impl EvaluateOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// A folder or text that cannot be used.
    pub fn run(&self) -> Result<()> {
        let text = read_text("--data", &self.data)?;
        self.model.run(|model, tokenizer| {
            let (loss, count) = self.measure(model, tokenizer, &text)?;
            say(format_args!("tokens: {count}, loss: {loss:.4}, perplexity: {:.3}", loss.exp()))
        })
    }

    /// The mean loss, and of how many tokens.
    fn measure(&self, model: &CausalLm, tokenizer: &Tokenizer, text: &str) -> Result<(f64, usize)> {
        let longest = model.config().max_len;
        let length = self.length.unwrap_or(longest.min(1024));
        if length > longest {
            let help = format!("the model has {longest} positions");
            return Err(Error::Option { option: "--length", got: length.to_string(), help });
        }
        let tokens = tokenizer.encode_whole(text)?;
        let predicted = tokens.len().saturating_sub(1);
        if predicted == 0 {
            let help = "it must have two tokens at least, one to predict from and one to predict".into();
            return Err(Error::Option { option: "--data", got: format!("{} tokens", tokens.len()), help });
        }
        let mut total = 0.0;
        for first in (0..predicted).step_by(length) {
            let len = length.min(predicted - first);
            let row = |from: usize| Tensor::from_slice(&tokens[from..from + len], (1, len), &Device::Cpu);
            let loss = model.loss(&row(first)?, &row(first + 1)?)?.to_dtype(DType::F64)?;
            total += loss.to_scalar::<f64>()? * len as f64;
        }
        Ok((total / predicted as f64, predicted))
    }
}
