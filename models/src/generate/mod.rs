//! Text generation: one token at a time, greedy or sampled.

mod file;
mod scores;

use std::ops::ControlFlow;

use candle_core::{DType, Device, Tensor};
use ops::RowContext;
use sampler::Generator;

use crate::{Cache, CausalLm, Error, Result};

use scores::argmax;

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateConfig {
    /// Maximum number of new tokens. Default: 128.
    pub max_new_tokens: usize,
    /// Divisor of the logits: below 1 makes likely tokens more likely; 0 always picks the likeliest (greedy). Default:
    /// 0.
    pub temperature: f64,
    /// Sample only from this many of the likeliest tokens, and from those that are as likely as the last of them. Default:
    /// all.
    pub top_k: Option<usize>,
    /// Sample only from the likeliest tokens that together have this probability, above 0 (nucleus sampling). Default:
    /// all.
    pub top_p: Option<f64>,
    /// Sample only from tokens of at least this part of the likeliest one's probability. Default: all.
    pub min_p: Option<f64>,
    /// Seed of the random numbers. Default: 42.
    pub seed: u64,
    /// Tokens that end the text; they are part of the output. Default: none.
    pub stop: Vec<u32>,
    /// Minimum number of new tokens: none that ends the text comes before. Default: 0.
    pub min_new_tokens: usize,
    /// Divisor of the positive logits of all tokens of prompt and text, and factor of the negative ones: above 1,
    /// repetitions become less likely. Default: 1.
    pub repetition_penalty: f64,
    /// No sequence of this many tokens comes twice, counting those of the prompt. Default: 0, any may.
    pub no_repeat_ngram_size: usize,
    /// Sequences of tokens that never come. Default: none.
    pub bad_words: Vec<Vec<u32>>,
    /// Tokens that never come. Default: none.
    pub suppress_tokens: Vec<u32>,
    /// Tokens that are not the first new one. Default: none.
    pub begin_suppress_tokens: Vec<u32>,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            max_new_tokens: 128,
            temperature: 0.0,
            top_k: None,
            top_p: None,
            min_p: None,
            seed: 42,
            stop: Vec::new(),
            min_new_tokens: 0,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            bad_words: Vec::new(),
            suppress_tokens: Vec::new(),
            begin_suppress_tokens: Vec::new(),
        }
    }
}

impl GenerateConfig {
    fn validate(&self) -> Result<()> {
        let refuse = |field: &'static str, got: String, help: &'static str| {
            Err(Error::Invalid { what: "GenerateConfig", field, got, help })
        };
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return refuse(
                "temperature",
                self.temperature.to_string(),
                "it must be a finite number, 0 or more",
            );
        }
        if self.top_k == Some(0) {
            return refuse("top_k", "0".into(), "there must be a token at least");
        }
        if let Some(min_p) = self.min_p.filter(|min_p| !(0.0..=1.0).contains(min_p)) {
            return refuse("min_p", min_p.to_string(), "it must be 0 to 1");
        }
        let penalty = self.repetition_penalty;
        if !(penalty.is_finite() && penalty > 0.0) {
            return refuse("repetition_penalty", penalty.to_string(), "it must be a finite number above 0");
        }
        match self.top_p {
            Some(top_p) if !(top_p > 0.0 && top_p <= 1.0) => {
                refuse("top_p", top_p.to_string(), "it must be above 0 and at most 1")
            }
            _ => Ok(()),
        }
    }
}

/// Continues a prompt and returns the new tokens. `on_token` is called with each as soon as it is chosen, and can stop
/// the generation.
///
/// Generation ends after [`GenerateConfig::max_new_tokens`], after a token of [`GenerateConfig::stop`], or when the
/// model has no position left. If the model is distributed over several ranks, all call this with the same prompt and
/// get the same tokens. In a scope of [`DividedRows`](ops::DividedRows) of the prompt's length each rank computes its places of the prompt; all
/// ranks then have the keys and values of all places, and compute the new tokens.
///
/// # Cost
/// Each token is computed once; keys and values of all tokens are cached.
///
/// # Errors
/// An empty prompt, one longer than the model's positions, or not of the divided rows' length; an invalid configuration; logits that are NaN; failures
/// of communication.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use candle_core::{DType, Device};
/// use models::{CausalLm, GenerateConfig, Weights, generate};
/// use training::build::Builder;
///
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama").as_ref();
/// let weights = Weights::folder(folder)?;
/// let model = CausalLm::new(weights.config(), &Builder::new(weights.tensors(DType::F32, &Device::Cpu)))?;
/// let config = GenerateConfig { max_new_tokens: 5, temperature: 0.8, top_p: Some(0.9), ..Default::default() };
/// let tokens = generate(&model, &[1, 5, 9], &config, |_| ControlFlow::Continue(()))?;
/// assert_eq!(tokens.len(), 5);
/// # Ok::<(), models::Error>(())
/// ```
pub fn generate(
    model: &CausalLm,
    prompt: &[u32],
    config: &GenerateConfig,
    on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>> {
    let device = model.device().cloned().unwrap_or(Device::Cpu);
    let mut cache = Cache::new();
    let context = RowContext::current();
    let after_prompt = RowContext { divided: None, ..context.clone() };
    let next_logits = |row: &[u32]| {
        let new = &row[cache.len()..];
        let new = Tensor::from_slice(new, (1, new.len()), &device)?;
        Ok(match context.divided.as_ref().filter(|_| cache.is_empty()) {
            Some(rows) => model.next_logits(&rows.part_of(&new)?, &mut cache)?,
            None => after_prompt.scope(|| model.next_logits(&new, &mut cache))?,
        })
    };
    generate_with(next_logits, model.config().max_len, prompt, config, on_token)
}

/// As [`generate`] for any model: `next_logits` returns the logits of the token after the given ones. It is called with
/// at most `max_len` tokens, but the length of the prompt is not checked.
///
/// # Errors
/// An invalid configuration; logits that are NaN; errors of `next_logits`.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use candle_core::{Device, Tensor};
/// use models::{GenerateConfig, generate_with};
///
/// // After a token comes the one that is one more.
/// let next = |row: &[u32]| Ok(Tensor::from_iter((0..8).map(|token| f32::from(token == row[row.len() - 1] + 1)), &Device::Cpu)?);
/// let config = GenerateConfig { max_new_tokens: 9, ..GenerateConfig::default() };
/// assert_eq!(generate_with(next, 4, &[2, 3], &config, |_| ControlFlow::Continue(()))?, [4, 5, 6]);
/// # Ok::<(), models::Error>(())
/// ```
pub fn generate_with(
    mut next_logits: impl FnMut(&[u32]) -> Result<Tensor>,
    max_len: usize,
    prompt: &[u32],
    config: &GenerateConfig,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>> {
    config.validate()?;
    let mut chooser = TokenSampler::new(config);
    let mut row: Vec<u32> = prompt.to_vec();
    let mut tokens = Vec::new();
    while tokens.len() < config.max_new_tokens {
        // A prompt that is too long is left to `next_logits` to refuse.
        if !tokens.is_empty() && row.len() > max_len {
            break;
        }
        let token = chooser.choose(&next_logits(&row)?, &row, tokens.len())?;
        tokens.push(token);
        if on_token(token).is_break() || config.stop.contains(&token) {
            break;
        }
        row.push(token);
    }
    Ok(tokens)
}

/// Chooses tokens from their logits.
struct TokenSampler<'a> {
    config: &'a GenerateConfig,
    random: Generator,
}

impl<'a> TokenSampler<'a> {
    fn new(config: &'a GenerateConfig) -> Self {
        Self { config, random: Generator::new(config.seed) }
    }

    /// Chooses the token after `row`, of which the last `new` tokens were generated.
    fn choose(&mut self, logits: &Tensor, row: &[u32], new: usize) -> Result<u32> {
        let mut logits = logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        if logits.iter().any(|logit| logit.is_nan()) {
            let help = "its weights or its training are broken";
            return Err(Error::Invalid { what: "the model", field: "logits", got: "NaN".into(), help });
        }
        self.config.change(&mut logits, row, new);
        if self.config.temperature == 0.0 {
            return Ok(argmax(&logits));
        }
        let candidates = self.config.candidates(&logits);
        let drawn = f64::from(self.random.next_u32()) / (f64::from(u32::MAX) + 1.0);
        Ok(drawn_from(&candidates, drawn))
    }
}

/// Picks a candidate, in proportion to the weights, by a number from 0 to 1.
fn drawn_from(candidates: &[(u32, f64)], drawn: f64) -> u32 {
    let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
    let mut left = drawn * total;
    for (token, weight) in candidates {
        if left < *weight {
            return *token;
        }
        left -= weight;
    }
    candidates.last().map_or(0, |(token, _)| *token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_as_frequent_as_they_are_likely() {
        let config = GenerateConfig { temperature: 0.5, ..Default::default() };
        let mut chooser = TokenSampler::new(&config);
        let logits = Tensor::new(&[[0f32, 2f32.ln()]], &Device::Cpu).unwrap();
        let ones = (0..2000).map(|_| chooser.choose(&logits, &[], 0).unwrap()).sum::<u32>();
        // Logits that differ by ln 2, at temperature 0.5: odds of 1 to 4.
        assert!((1540..1660).contains(&ones), "{ones}");
    }

    #[test]
    fn extreme_logits_are_chosen_from() {
        let config = GenerateConfig { temperature: 1.0, ..Default::default() };
        let choose = |logits: &[f32]| {
            TokenSampler::new(&config).choose(&Tensor::new(logits, &Device::Cpu).unwrap(), &[], 0)
        };
        assert_eq!(choose(&[f32::NEG_INFINITY, 0.0]).unwrap(), 1);
        assert_eq!(choose(&[f32::INFINITY, 0.0]).unwrap(), 0);
        assert!(choose(&[f32::NAN, 0.0]).unwrap_err().to_string().contains("NaN"));
    }

    #[test]
    fn configurations_that_cannot_be_are_named() {
        let line = |config: GenerateConfig| config.validate().unwrap_err().to_string();
        assert!(
            line(GenerateConfig { temperature: -1.0, ..Default::default() }).contains("temperature is -1")
        );
        assert!(line(GenerateConfig { top_k: Some(0), ..Default::default() }).contains("top_k is 0"));
        assert!(line(GenerateConfig { top_p: Some(0.0), ..Default::default() }).contains("top_p is 0"));
    }
}
