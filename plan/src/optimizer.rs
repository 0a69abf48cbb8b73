//! Optimizers, by the size of their state.

use serde::Serialize;

/// Kind of optimizer, by its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// No state.
    Sgd,
    /// One number per parameter.
    Momentum,
    /// Two numbers per parameter.
    Adam,
    /// One number for each element of a hidden layer's matrix, two for the others; matrices are brought together.
    Muon,
}

impl Optimizer {
    /// Returns the numbers of state per parameter; of Muon, for those that it leaves to AdamW.
    pub fn numbers(self) -> u64 {
        match self {
            Self::Sgd => 0,
            Self::Momentum => 1,
            Self::Adam | Self::Muon => 2,
        }
    }

    /// Returns the name for display.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sgd => "SGD",
            Self::Momentum => "SGD with momentum",
            Self::Adam => "Adam",
            Self::Muon => "Muon",
        }
    }
}
