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
}

impl Optimizer {
    /// Returns the numbers of state per parameter.
    pub fn numbers(self) -> u64 {
        match self {
            Self::Sgd => 0,
            Self::Momentum => 1,
            Self::Adam => 2,
        }
    }

    /// Returns the name for display.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sgd => "SGD",
            Self::Momentum => "SGD with momentum",
            Self::Adam => "Adam",
        }
    }
}
