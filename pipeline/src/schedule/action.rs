//! Actions: the entries of a schedule.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A kind of [`Action`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ActionKind {
    /// The stage's forward pass.
    Forward,
    /// The stage's whole backward pass.
    Backward,
    /// The part of backward that computes the gradient of the input, which the previous stage waits for.
    BackwardInput,
    /// The part of backward that computes the gradients of the weights, which no other stage waits for.
    BackwardWeight,
    /// Sends the stage's output to the next stage.
    SendActivation,
    /// Receives the stage's input from the previous stage.
    RecvActivation,
    /// Sends the gradient of the stage's input to the previous stage.
    SendGradient,
    /// Receives the gradient of the stage's output from the next stage.
    RecvGradient,
}

impl ActionKind {
    /// Returns true for computations, false for messages.
    pub(crate) fn is_compute(self) -> bool {
        matches!(self, Self::Forward | Self::Backward | Self::BackwardInput | Self::BackwardWeight)
    }

    /// Returns the abbreviation used in grids: `F`, `B`, `I`, `W`; `SA`, `RA`, `SG` and `RG` for messages.
    pub fn letters(self) -> &'static str {
        match self {
            Self::Forward => "F",
            Self::Backward => "B",
            Self::BackwardInput => "I",
            Self::BackwardWeight => "W",
            Self::SendActivation => "SA",
            Self::RecvActivation => "RA",
            Self::SendGradient => "SG",
            Self::RecvGradient => "RG",
        }
    }
}

/// One entry of a [`Table`](super::Table): an operation of one stage on one micro-batch.
///
/// ```
/// use pipeline::{Action, ActionKind};
///
/// let action = Action { kind: ActionKind::Forward, stage: 1, micro_batch: 3 };
/// assert_eq!(action.to_string(), "forward of micro-batch 3 in stage 1");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Action {
    /// The operation.
    pub kind: ActionKind,
    /// The stage that computes, sends or receives.
    pub stage: usize,
    /// The micro-batch, from 0.
    pub micro_batch: usize,
}

impl Action {
    pub(crate) fn forward(stage: usize, micro_batch: usize) -> Self {
        Self { kind: ActionKind::Forward, stage, micro_batch }
    }

    pub(crate) fn backward(stage: usize, micro_batch: usize) -> Self {
        Self { kind: ActionKind::Backward, stage, micro_batch }
    }

    pub(crate) fn input(stage: usize, micro_batch: usize) -> Self {
        Self { kind: ActionKind::BackwardInput, stage, micro_batch }
    }

    pub(crate) fn weight(stage: usize, micro_batch: usize) -> Self {
        Self { kind: ActionKind::BackwardWeight, stage, micro_batch }
    }

    /// Returns the action of another kind for the same stage and micro-batch.
    pub(crate) fn as_kind(self, kind: ActionKind) -> Self {
        Self { kind, ..self }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, stage, micro_batch } = self;
        let what = match kind {
            ActionKind::Forward => "forward",
            ActionKind::Backward => "backward",
            ActionKind::BackwardInput => "backward for the input",
            ActionKind::BackwardWeight => "backward for the weights",
            ActionKind::SendActivation => "sending the output",
            ActionKind::RecvActivation => "receiving the input",
            ActionKind::SendGradient => "sending the input's gradient",
            ActionKind::RecvGradient => "receiving the output's gradient",
        };
        write!(f, "{what} of micro-batch {micro_batch} in stage {stage}")
    }
}
