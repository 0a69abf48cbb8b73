//! How fast each pair of numbers turns with the position, computed in f32 as Hugging Face's transformers does.

use std::f64::consts::{PI, TAU};

use crate::{Error, Result};

/// How a model reaches beyond the length that it was trained with.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// Not at all.
    #[default]
    None,
    /// Positions are divided by `factor` (`rope_type` "linear").
    Linear {
        /// How many times longer.
        factor: f64,
    },
    /// Slow pairs are slowed down, fast ones are not (`rope_type` "llama3").
    Llama3 {
        /// How many times longer.
        factor: f64,
        /// Pairs that turn fewer times than this within the original length are slowed down by all of `factor`.
        low_freq_factor: f64,
        /// Pairs that turn more often than this are not slowed down.
        high_freq_factor: f64,
        /// `original_max_position_embeddings`.
        original_max_len: usize,
    },
    /// Slow pairs are slowed down, fast ones are not, and scores are sharpened (`rope_type` "yarn").
    Yarn {
        /// How many times longer.
        factor: f64,
        /// `original_max_position_embeddings`.
        original_max_len: usize,
        /// Turns within the original length from which on a pair is not slowed down: 32 in transformers.
        beta_fast: f64,
        /// Turns up to which a pair is slowed down by all of `factor`: 1 in transformers.
        beta_slow: f64,
        /// What queries and keys are multiplied with: `0.1 ln(factor) + 1` where there is none.
        attention_factor: Option<f64>,
        /// Whether the bounds between slow and fast are rounded outwards to whole pairs: true in transformers.
        truncate: bool,
    },
}

/// The angle per position of each pair of `head_dim` numbers, and what the rotated numbers are multiplied with.
pub(super) fn frequencies(head_dim: usize, theta: f64, scaling: &RotaryScaling) -> Result<(Vec<f32>, f64)> {
    scaling.validate()?;
    // Powers in f64, rounded: what an exact f32 power gives.
    let power = |pair: usize| theta.powf(f64::from((2 * pair) as f32 / head_dim as f32)) as f32;
    let powers = (0..head_dim / 2).map(power);
    let one_over = |x: f32| 1.0 / x;
    Ok(match *scaling {
        RotaryScaling::None => (powers.map(one_over).collect(), 1.0),
        RotaryScaling::Linear { factor } => (powers.map(|x| one_over(x) / factor as f32).collect(), 1.0),
        RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_len } => {
            let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
            let slowed = |frequency: f32| {
                let turns = original_max_len as f32 / (TAU as f32 / frequency);
                if turns < low {
                    return frequency / factor;
                }
                if turns > high {
                    return frequency;
                }
                let smooth = (turns - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            };
            (powers.map(one_over).map(slowed).collect(), 1.0)
        }
        RotaryScaling::Yarn {
            factor,
            original_max_len,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        } => {
            let dim = head_dim as f64;
            // The pair, counted in numbers, that turns so many times within the original length.
            let pair =
                |turns: f64| dim * (original_max_len as f64 / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
            let (low, high) = (pair(beta_fast), pair(beta_slow));
            let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
            let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
            if low == high {
                high += 0.001;
            }
            let mixed = |(index, power): (usize, f32)| {
                let slow = ((index as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let fast = 1.0 - slow;
                one_over(factor as f32 * power) * (1.0 - fast) + one_over(power) * fast
            };
            let sharper = if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            (powers.enumerate().map(mixed).collect(), attention_factor.unwrap_or(sharper))
        }
    })
}

impl RotaryScaling {
    fn validate(&self) -> Result<()> {
        const HELP: &str = "it must be a finite number above 0";
        let check = |fields: &[(&'static str, f64)]| match fields
            .iter()
            .find(|(_, got)| !(got.is_finite() && *got > 0.0))
        {
            None => Ok(()),
            Some(&(field, got)) => Err(Error::InvalidConfig { of: "RotaryScaling", field, got, help: HELP }),
        };
        match *self {
            Self::None => Ok(()),
            Self::Linear { factor } => check(&[("factor", factor)]),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_len } => {
                check(&[
                    ("factor", factor),
                    ("low_freq_factor", low_freq_factor),
                    ("original_max_len", original_max_len as f64),
                ])?;
                if high_freq_factor > low_freq_factor {
                    return Ok(());
                }
                Err(Error::InvalidConfig {
                    of: "RotaryScaling",
                    field: "high_freq_factor",
                    got: high_freq_factor,
                    help: "it must be above low_freq_factor",
                })
            }
            Self::Yarn { factor, original_max_len, beta_fast, beta_slow, attention_factor, .. } => check(&[
                ("factor", factor),
                ("original_max_len", original_max_len as f64),
                ("beta_fast", beta_fast),
                ("beta_slow", beta_slow),
                ("attention_factor", attention_factor.unwrap_or(1.0)),
            ]),
        }
    }
}
