//! Optimizers, by the size of their state.

use serde::Serialize;

/// Kind of optimizer, by its state; also a value of `plan --optimizer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "command", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// It keeps nothing
    Sgd,
    /// It keeps one number per parameter
    Momentum,
    /// It keeps two numbers per parameter
    Adam,
    /// It keeps one number per parameter of a hidden layer's matrix, else two
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
