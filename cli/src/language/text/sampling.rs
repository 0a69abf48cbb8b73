//! How `generate` chooses tokens: by its options, or else by the folder's `generation_config.json`.

use std::path::Path;

use crate::error::{Error, Result};
use crate::options::{count, probability, seed};
use clap::Args;
use models::{GenerateConfig, ModelConfig, Tokenizer};

/// Options of sampling. The folder is that of the model; its `generation_config.json` has defaults.
#[derive(Debug, Clone, Args)]
pub(super) struct SamplingOptions {
    /// Most tokens to generate [default: the folder's, or 128]
    #[arg(long, value_name = "N", value_parser = count)]
    max_new_tokens: Option<usize>,
    /// Fewest tokens to generate [default: the folder's, or 0]
    #[arg(long, value_name = "N")]
    min_new_tokens: Option<usize>,
    /// Temperature of sampling [default: the folder's, or 0]
    ///
    /// 0 takes the likeliest token. The folder's temperature is the one of its generation_config.json, if that has `do_sample`.
    #[arg(long, value_name = "T", value_parser = temperature)]
    temperature: Option<f64>,
    /// Sample from the K likeliest tokens [default: the folder's, or all]
    #[arg(long, value_name = "K", value_parser = count)]
    top_k: Option<usize>,
    /// Sample from the top tokens with this total probability
    ///
    /// By default the folder's, or all.
    #[arg(long, value_name = "P", value_parser = share)]
    top_p: Option<f64>,
    /// Sample from tokens with this part of the top one's probability
    ///
    /// By default the folder's, or all.
    #[arg(long, value_name = "P", value_parser = probability)]
    min_p: Option<f64>,
    /// Above 1: tokens that occurred become less likely
    ///
    /// Positive logits of tokens of the prompt and the text are divided by it, and negative ones multiplied. By default the folder's, or 1.
    #[arg(long, value_name = "R", value_parser = above_zero)]
    repetition_penalty: Option<f64>,
    /// No N tokens come twice in a row that is the same
    ///
    /// No sequence of N tokens of the prompt and the text comes again. By default the folder's, or 0: any may.
    #[arg(long, value_name = "N")]
    no_repeat_ngram_size: Option<usize>,
    /// Numbers of tokens that never come [default: the folder's]
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    suppress_tokens: Option<Vec<u32>>,
    /// Seed of sampling
    #[arg(long, value_name = "N", default_value = "42", value_parser = seed)]
    seed: u64,
}

fn temperature(text: &str) -> std::result::Result<f64, &'static str> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or("give a finite number, 0 or more")
}

fn share(text: &str) -> std::result::Result<f64, &'static str> {
    probability(text).ok().filter(|share| *share > 0.0).ok_or("give a number above 0 and at most 1")
}

fn above_zero(text: &str) -> std::result::Result<f64, &'static str> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or("give a finite number above 0")
}

impl SamplingOptions {
    /// Returns how the tokens after a prompt of this many are chosen, and what is worth a note about it.
    ///
    /// # Errors
    /// A `generation_config.json` that cannot be used; options that have no effect.
    pub(super) fn config(
        &self,
        folder: &Path,
        model: &ModelConfig,
        tokenizer: &Tokenizer,
        prompt: usize,
    ) -> Result<(GenerateConfig, Vec<String>)> {
        let (of_folder, unsupported) = GenerateConfig::from_folder(folder, prompt)?;
        if of_folder.max_new_tokens == 0 && self.max_new_tokens.is_none() {
            let help =
                format!("the prompt's {prompt} tokens are all that generation_config.json allows: give it");
            return Err(Error::Option { option: "--max-new-tokens", got: "none".into(), help });
        }
        let config = GenerateConfig {
            max_new_tokens: self.max_new_tokens.unwrap_or(of_folder.max_new_tokens),
            min_new_tokens: self.min_new_tokens.unwrap_or(of_folder.min_new_tokens),
            temperature: self.temperature.unwrap_or(of_folder.temperature),
            top_k: self.top_k.or(of_folder.top_k),
            top_p: self.top_p.or(of_folder.top_p),
            min_p: self.min_p.or(of_folder.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(of_folder.repetition_penalty),
            no_repeat_ngram_size: self.no_repeat_ngram_size.unwrap_or(of_folder.no_repeat_ngram_size),
            suppress_tokens: self
                .suppress_tokens
                .clone()
                .unwrap_or_else(|| of_folder.suppress_tokens.clone()),
            seed: self.seed,
            ..of_folder.with_ends_of(model, tokenizer)?
        };
        let of_sampling =
            [("--top-k", self.top_k.map(|k| k as f64)), ("--top-p", self.top_p), ("--min-p", self.min_p)];
        let unused = of_sampling.into_iter().find_map(|(option, given)| Some((option, given?)));
        if let (Some((option, got)), true) = (unused, config.temperature == 0.0) {
            let help = "without --temperature the likeliest token is taken: give one above 0".into();
            return Err(Error::Option { option, got: got.to_string(), help });
        }
        let sampled = (self.temperature.is_none() && config.temperature > 0.0).then(|| sampling(&config));
        Ok((config, unsupported.into_iter().chain(sampled).collect()))
    }
}

/// Describes sampling that no option asks for.
fn sampling(config: &GenerateConfig) -> String {
    let top_k = config.top_k.map(|k| format!(", top_k {k}")).unwrap_or_default();
    let top_p = config.top_p.map(|p| format!(", top_p {p}")).unwrap_or_default();
    format!(
        "sampling as generation_config.json says: temperature {}{top_k}{top_p}; --temperature 0 takes the likeliest token",
        config.temperature
    )
}
