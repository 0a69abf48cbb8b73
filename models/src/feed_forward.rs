//! Dense feed-forward layer.

use candle_core::{Module, Result, Tensor};
use ops::Gate;
use training::build::{Division, Linear, LinearConfig, Part};

use crate::{Family, ModelConfig};

/// Gated, or of GPT-2 without a gate.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Gated { gate: Linear, up: Linear, down: Linear, activation: Gate },
    Plain { up: Linear, down: Linear, activation: Gate },
}

impl FeedForward {
    /// One of this width.
    pub(crate) fn new(config: &ModelConfig, wide: usize, part: &Part) -> Result<Self> {
        let (hidden, activation) = (config.hidden_size, config.activation);
        let into = |name: &str| {
            part.pp(name)
                .linear(&LinearConfig::new(hidden, wide, Division::Outputs).with_bias(config.mlp_bias))
        };
        let from = |name: &str| {
            part.pp(name)
                .linear(&LinearConfig::new(wide, hidden, Division::Inputs).with_bias(config.mlp_bias))
        };
        Ok(match config.family {
            Family::Gpt2 => Self::Plain { up: into("c_fc")?, down: from("c_proj")?, activation },
            _ => Self::Gated {
                gate: into("gate_proj")?,
                up: into("up_proj")?,
                down: from("down_proj")?,
                activation,
            },
        })
    }
}

impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gated { gate, up, down, activation } => {
                down.forward(&activation.apply(&gate.forward(x)?, &up.forward(x)?)?)
            }
            Self::Plain { up, down, activation } => down.forward(&activation.activate(&up.forward(x)?)?),
        }
    }
}
