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
}

impl Recompute {
    /// Whether the unit that is built after `before` others is one.
    pub(super) fn has(self, before: usize) -> Result<bool> {
        match self {
            Self::None => Ok(false),
            Self::Units => Ok(true),
            Self::Every(0) => bail!("Recompute::Every(0): give 1 or more, or Recompute::None"),
            Self::Every(each) => Ok((before + 1).is_multiple_of(each)),
        }
    }
}
