//! Activation checkpointing: which units are recomputed in backward.

use candle_core::{Result, bail};

/// Which units keep only their input for backward, which recomputes them ([`ops::recompute`]). Applies to units
/// with a float input that run by [`Module::forward`](candle_core::Module) or [`Unit::apply`](super::Unit::apply). A
/// unit whose input is tokens, such as an embedding, is never recomputed, as it would gain nothing.
///
/// Losses and gradients do not change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// None: everything that backward needs is kept.
    #[default]
    None,
    /// Every unit: the least memory, a third more time.
    Units,
    /// Every n-th unit, in the order in which the model builds them.
    Every(usize),
    /// Every unit, but only its cheap operations: results of matrix products and attention are kept; norms,
    /// activations and similar are recomputed ([`ops::recompute_cheap`]).
    Selective,
}

/// What backward recomputes of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecomputeMode {
    All,
    Cheap,
}

impl Recompute {
    /// What to recompute of the unit that is built after `before` others.
    pub(super) fn mode_of_unit(self, before: usize) -> Result<Option<RecomputeMode>> {
        match self {
            Self::None => Ok(None),
            Self::Units => Ok(Some(RecomputeMode::All)),
            Self::Every(0) => bail!("Recompute::Every(0): give 1 or more, or Recompute::None"),
            Self::Every(each) => Ok((before + 1).is_multiple_of(each).then_some(RecomputeMode::All)),
            Self::Selective => Ok(Some(RecomputeMode::Cheap)),
        }
    }
}
