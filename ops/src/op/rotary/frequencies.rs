//! Frequencies of rotary position embedding, computed in f32 as Hugging Face's transformers does.

use std::f64::consts::{PI, TAU};

use crate::{Error, Result};

/// How rotary angles are scaled for contexts longer than those the model was trained with.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// No scaling.
    #[default]
    None,
    /// Positions are divided by `factor` (`rope_type` "linear").
    Linear {
        /// Ratio of the extended to the original length.
        factor: f64,
    },
    /// Low frequencies are divided by `factor`, high ones are kept (`rope_type` "llama3").
    Llama3 {
        /// Ratio of the extended to the original length.
        factor: f64,
        /// Pairs with fewer turns than this within the original length have their frequency divided by `factor`.
        low_freq_factor: f64,
        /// Pairs with more turns than this keep their frequency.
        high_freq_factor: f64,
        /// `original_max_position_embeddings`.
        original_max_len: usize,
    },
    /// Low frequencies are divided by `factor`, high ones are kept, and attention scores are scaled up (`rope_type`
    /// "yarn").
    Yarn {
        /// Ratio of the extended to the original length.
        factor: f64,
        /// `original_max_position_embeddings`.
        original_max_len: usize,
        /// Pairs with this many turns or more within the original length keep their frequency: 32 in transformers.
        beta_fast: f64,
        /// Pairs with this many turns or fewer have their frequency divided by `factor`: 1 in transformers.
        beta_slow: f64,
        /// Factor of queries and keys. `None`: `0.1 ln(factor) + 1`, or 1 for a `factor` of 1 or less.
        attention_factor: Option<f64>,
        /// Whether the bounds between low and high frequencies are rounded outwards to whole pairs: true in
        /// transformers.
        truncate: bool,
    },
}

/// Returns the angle per position of each pair in a head of `head_dim`, and the factor of the rotated numbers.
pub(super) fn frequencies(head_dim: usize, theta: f64, scaling: &RotaryScaling) -> Result<(Vec<f32>, f64)> {
    scaling.validate()?;
    // Computed in f64 and rounded, which equals an exact f32 power.
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
            // Index of the pair that makes so many turns within the original length.
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
