//! What a rank holds and sends, measured: memory by kind, and bytes of a step.

use serde::{Deserialize, Serialize};

/// Bytes of one rank, as `--metrics` has them and `plan` foretells them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Held {
    /// Parameters, or this rank's part of them.
    pub weights: u64,
    /// What there is of parameters beside that: copies that a model computes with, gathered ones.
    pub copies: u64,
    /// Gradients.
    pub gradients: u64,
    /// What the optimizer remembers.
    pub optimizer: u64,
    /// What forward keeps for backward: what operations give to each other, and what they keep to themselves.
    pub activations: u64,
    /// What is sent in a step, on the average.
    pub sent: f64,
}

impl Held {
    /// All that is for the model.
    pub fn model(&self) -> u64 {
        self.weights + self.copies + self.gradients + self.optimizer
    }

    /// The larger of each.
    pub fn largest(self, other: Self) -> Self {
        Self {
            weights: self.weights.max(other.weights),
            copies: self.copies.max(other.copies),
            gradients: self.gradients.max(other.gradients),
            optimizer: self.optimizer.max(other.optimizer),
            activations: self.activations.max(other.activations),
            sent: self.sent.max(other.sent),
        }
    }
}
