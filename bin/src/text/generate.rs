//! `generate`: text that a model writes.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use models::{CausalLm, GenerateConfig, Tokenizer};

use super::{ModelOptions, read_text};
use crate::console::note;
use crate::error::{Error, Result};
use crate::options::{count, probability, seed};

/// Options of `generate`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints the prompt and what the model continues it with, as it is written, on standard output. Without
--temperature each token is the likeliest one. It ends with --max-new-tokens, with the tokenizer's
token for the end of a text, or where the model has no more positions.")]
pub struct GenerateOptions {
    #[command(flatten)]
    model: ModelOptions,
    /// Text to continue
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "prompt_file",
        conflicts_with = "prompt_file"
    )]
    prompt: Option<String>,
    /// File with the text to continue
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Tokens at most
    #[arg(long, value_name = "N", default_value = "128", value_parser = count, allow_negative_numbers = true)]
    max_new_tokens: usize,
    /// What logits are divided by: below 1 likely tokens are more likely, at 0 it is always the likeliest
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature, allow_negative_numbers = true)]
    temperature: f64,
    /// How many of the likeliest tokens are chosen from [default: all]
    #[arg(long, value_name = "K", value_parser = count, allow_negative_numbers = true)]
    top_k: Option<usize>,
    /// Of the likeliest tokens, as many are chosen from as have this probability together [default: all]
    #[arg(long, value_name = "P", value_parser = share, allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Seed of the choices
    #[arg(long, value_name = "N", default_value = "42", value_parser = seed, allow_negative_numbers = true)]
    seed: u64,
}

fn temperature(text: &str) -> std::result::Result<f64, &'static str> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or("give a finite number, 0 or more")
}

fn share(text: &str) -> std::result::Result<f64, &'static str> {
    probability(text).ok().filter(|share| *share > 0.0).ok_or("give a number above 0 and at most 1")
}

impl GenerateOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// A folder or prompt that cannot be used, and standard output that cannot be written.
    pub fn run(&self) -> Result<()> {
        let prompt = match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(path)) => read_text("--prompt-file", path)?,
            (None, None) => String::new(),
        };
        self.model.run(|model, tokenizer| self.write(model, tokenizer, &prompt))
    }

    fn write(&self, model: &CausalLm, tokenizer: &Tokenizer, prompt: &str) -> Result<()> {
        let tokens = tokenizer.encode_whole(prompt)?;
        if tokens.is_empty() {
            let help = "the prompt has no tokens: give some text to continue".into();
            return Err(Error::Option { option: "--prompt", got: format!("{prompt:?}"), help });
        }
        let longest = model.config().max_len;
        if tokens.len() > longest {
            let (got, help) =
                (format!("{} tokens", tokens.len()), format!("the model has {longest} positions"));
            return Err(Error::Option { option: "--prompt", got, help });
        }
        let config = GenerateConfig {
            max_new_tokens: self.max_new_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
            stop: tokenizer.end_of_text().into_iter().collect(),
        };
        let (mut text, mut problem) = (tokenizer.stream(), None);
        // Some tokenizers write a token at the beginning of a text otherwise than after others.
        for &token in &tokens {
            text.push(token)?;
        }
        print(prompt)?;
        let began = Instant::now();
        let new = models::generate(model, &tokens, &config, |token| {
            let shown =
                text.push(token).map_err(Error::from).and_then(|piece| print(&piece.unwrap_or_default()));
            match shown {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    problem = Some(error);
                    ControlFlow::Break(())
                }
            }
        })?;
        if let Some(problem) = problem {
            return Err(problem);
        }
        print("\n")?;
        let seconds = began.elapsed().as_secs_f64();
        note(format_args!(
            "{} tokens in {seconds:.1} s: {:.1} a second",
            new.len(),
            new.len() as f64 / seconds
        ));
        Ok(())
    }
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}
