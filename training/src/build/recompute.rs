//! Which units are computed again in backward.

use candle_core::{Result, bail};

/// Which units keep only their input for backward, which computes them again ([`crate::recompute`]): those whose input is of floats,
/// and that run by [`Module::forward`](candle_core::Module) or [`Unit::apply`](super::Unit::apply). A unit of tokens, such as an embedding,
/// has nothing to gain.
///
/// Losses and gradients are the same.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// None: all that backward needs is kept.
    #[default]
    None,
    /// Each: the least memory, and a third more time.
    Units,
    /// The last of each so many, in the order in which the model builds them.
    Every(usize),
    /// Of each the cheap rest: results of matrix products and attention are kept, norms, activations and the like are computed again
    /// ([`crate::recompute_cheap`]).
    Selective,
}

/// What backward computes again of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Again {
    All,
    Cheap,
}

impl Recompute {
    /// What is computed again of the unit that is built after `before` others.
    pub(super) fn of(self, before: usize) -> Result<Option<Again>> {
        match self {
            Self::None => Ok(None),
            Self::Units => Ok(Some(Again::All)),
            Self::Every(0) => bail!("Recompute::Every(0): give 1 or more, or Recompute::None"),
            Self::Every(each) => Ok((before + 1).is_multiple_of(each).then_some(Again::All)),
            Self::Selective => Ok(Some(Again::Cheap)),
        }
    }
}
