//! Optimizers, by what they remember.

use serde::Serialize;

/// An optimizer, by what it remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Nothing.
    Sgd,
    /// A number for each parameter.
    Momentum,
    /// Two numbers for each parameter.
    Adam,
}

impl Optimizer {
    /// Numbers for each parameter.
    pub fn numbers(self) -> u64 {
        match self {
            Self::Sgd => 0,
            Self::Momentum => 1,
            Self::Adam => 2,
        }
    }

    /// As people write it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sgd => "SGD",
            Self::Momentum => "SGD with momentum",
            Self::Adam => "Adam",
        }
    }
}
