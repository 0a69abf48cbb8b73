//! A sample of what a model writes while it is trained.

use std::ops::ControlFlow;

use candle_core::Tensor;
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
    /// Prompt of the sample [default: the first row's]
    ///
    /// Each evaluation prints a sample of text. By default it continues the start of the first row.
    #[arg(long, value_name = "TEXT", requires = "evaluate", help_heading = "Evaluation and logging")]
    sample_prompt: Option<String>,
    /// Tokens of the sample
    #[arg(long, value_name = "N", default_value = "48", value_parser = count, allow_negative_numbers = true, help_heading = "Evaluation and logging")]
    sample: usize,
}

fn go_on(_: u32) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// How samples are written.
#[derive(Debug)]
pub(super) struct Sample {
    prompt: Vec<u32>,
    /// Positions of the model.
    max_len: usize,
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
        Ok(Some(Self { prompt, max_len: model.max_len, config }))
    }

    /// How the model goes on after the prompt. To be called on every rank.
    pub(super) fn write(
        &self,
        model: &mut Parallel<CausalLm>,
        tokenizer: &Tokenizer,
    ) -> girandole::Result<String> {
        let tokens = [self.prompt.clone(), self.new_tokens(model)?].concat();
        Ok(tokenizer.decode(&tokens)?)
    }

    /// They have no end: all ranks of a divided model compute as many tokens.
    fn new_tokens(&self, model: &mut Parallel<CausalLm>) -> girandole::Result<Vec<u32>> {
        let device = model.config().device.clone();
        if let Some(mut stages) = model.stages()? {
            // Without a cache: a few rows' worth of tokens in all.
            let next_logits = |row: &[u32]| {
                let tokens = Tensor::from_slice(row, (1, row.len()), &device)?;
                let last = |logits: &Tensor| logits.narrow(1, row.len() - 1, 1)?.contiguous()?.squeeze(1);
                Ok(stages.forward(&tokens, last).map_err(candle_core::Error::from)?)
            };
            let (prompt, config) = (&self.prompt, &self.config);
            return Ok(models::generate_by(next_logits, self.max_len, prompt, config, go_on)?);
        }
        match model.model()? {
            Some(model) => Ok(models::generate(model, &self.prompt, &self.config, go_on)?),
            None => Ok(Vec::new()),
        }
    }
}
