//! Measured memory of a rank by kind, and bytes that it sends in a step.

use serde::{Deserialize, Serialize};

/// Bytes of one rank, as written to `--metrics` and as predicted by `plan`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Parameters, or this rank's part of them.
    pub weights: u64,
    /// Further memory for parameters: copies that a model computes with, and gathered parameters.
    pub copies: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
    /// Activations that forward keeps for backward: results of operations, and what operations save internally.
    pub activations: u64,
    /// Bytes sent in a step, on average.
    pub sent: f64,
}

impl MemoryUse {
    /// Returns the memory of the model's parameters, gradients and optimizer state.
    pub fn model(&self) -> u64 {
        self.weights + self.copies + self.gradients + self.optimizer
    }

    /// Returns the larger value of each field.
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
