//! A sample of what a model writes while it is trained.

use clap::Args;
use girandole::Parallel;
use models::tokens::Rows;
use models::{CausalLm, GenerateConfig, ModelConfig, Tokenizer};

use crate::error::{Error, Result};
use crate::options::count;

/// Tokens of a row that a sample begins with where no prompt is given.
const PROMPT: usize = 8;

/// What is written at each evaluation.
#[derive(Debug, Clone, Args)]
pub(super) struct SampleOptions {
    /// Prompt of the sample [default: start of the first row]
    ///
    /// Each evaluation prints a sample of text, except with pipeline stages (pp).
    #[arg(long, value_name = "TEXT", requires = "evaluate", help_heading = "Evaluation and logging")]
    sample_prompt: Option<String>,
    /// Tokens of the sample
    #[arg(long, value_name = "N", default_value = "48", value_parser = count, allow_negative_numbers = true, help_heading = "Evaluation and logging")]
    sample: usize,
}

/// How samples are written.
#[derive(Debug)]
pub(super) struct Sample {
    prompt: Vec<u32>,
    config: GenerateConfig,
}

impl Sample {
    /// The same on all ranks. None without a tokenizer.
    pub(super) fn new(
        options: &SampleOptions,
        tokenizer: Option<&Tokenizer>,
        rows: &Rows,
        model: &ModelConfig,
        seed: u64,
    ) -> Result<Option<Self>> {
        let refuse = |got: &str, help: String| {
            Err(Error::Option { option: "--sample-prompt", got: format!("{got:?}"), help })
        };
        let prompt = match (&options.sample_prompt, tokenizer) {
            (None, None) => return Ok(None),
            (Some(text), None) => {
                return refuse(text, "there is no tokenizer to make tokens of it: leave it out".into());
            }
            (Some(text), Some(tokenizer)) => {
                let tokens = tokenizer.encode_whole(text)?;
                if tokens.is_empty() || tokens.len() > model.max_len {
                    let (found, most) = (tokens.len(), model.max_len);
                    return refuse(
                        text,
                        format!("it has {found} tokens: give 1 to {most}, as the model has positions"),
                    );
                }
                tokens
            }
            (None, Some(_)) => {
                let row = rows.get(0)?;
                row.tokens[..row.tokens.len().min(PROMPT)].to_vec()
            }
        };
        let config = GenerateConfig {
            max_new_tokens: options.sample,
            temperature: 0.8,
            top_k: Some(40),
            seed,
            ..GenerateConfig::default()
        };
        Ok(Some(Self { prompt, config }))
    }

    /// How the model goes on after the prompt, or nothing where no rank has the whole model. To be called on every rank.
    pub(super) fn write(
        &self,
        model: &Parallel<CausalLm>,
        tokenizer: &Tokenizer,
    ) -> girandole::Result<Option<String>> {
        let Some(model) = model.model()? else { return Ok(None) };
        let mut tokens = self.prompt.clone();
        // It has no end: all ranks of a divided model compute as many tokens.
        let new =
            models::generate(model, &self.prompt, &self.config, |_| std::ops::ControlFlow::Continue(()))?;
        tokens.extend(new);
        Ok(Some(tokenizer.decode(&tokens)?))
    }
}
