//! What a check of gradients finds.

use std::fmt;
use std::ops::Range;

use crate::missing_gradients::WITHOUT_BACKWARD;

/// Maximum number of ranges of rows listed for one parameter.
const RANGES: usize = 3;

/// The result of a check of gradients, the same on every rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GradientCheck {
    /// The parameters of whose gradient a part is lost or wrong; not more than a few are searched for.
    pub lost: Vec<LostGradient>,
    /// Whether there are more of them.
    pub has_more: bool,
    /// The parameters for which the check says nothing: the loss depends on them by less than its rounding, or they have 16
    /// bits, or the forward passes were used up.
    pub undecided: Vec<String>,
    /// Number of parameters, with those that are undecided.
    pub parameters: usize,
    /// Number of forward passes.
    pub forward_passes: usize,
}

/// A parameter, or some rows of it, whose gradient is not that of the loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostGradient {
    /// Name of the parameter.
    pub name: String,
    /// The rows (indices in the first dimension); empty for the whole parameter.
    pub rows: Vec<Range<usize>>,
    /// Whether backward gave no gradient for them, or exactly zero.
    pub is_zero: bool,
}

impl fmt::Display for LostGradient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        for (place, rows) in self.rows.iter().take(RANGES).enumerate() {
            let before = if place == 0 { ", rows" } else { " and" };
            write!(f, "{before} {} to {}", rows.start, rows.end - 1)?;
        }
        if self.rows.len() > RANGES {
            write!(f, " and others")?;
        }
        match self.is_zero {
            true => write!(f, " (the gradient is 0, and the loss depends on them)"),
            false => write!(f, " (a part of the gradient is missing or wrong)"),
        }
    }
}

impl fmt::Display for GradientCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lost, has_more, parameters, .. } = self;
        if lost.is_empty() {
            return write!(f, "no gradient of {parameters} parameters is found to be wrong");
        }
        write!(f, "backward does not give the gradient of the loss for ")?;
        for (place, lost) in lost.iter().enumerate() {
            let before = if place == 0 { "" } else { "; " };
            write!(f, "{before}{lost}")?;
        }
        if *has_more {
            write!(f, "; and others")?;
        }
        write!(
            f,
            ": an operation without backward, or with a wrong one, is between them and the loss. candle's own without are "
        )?;
        for (operation, instead) in WITHOUT_BACKWARD {
            write!(f, "{operation} (use {instead}), ")?;
        }
        write!(f, "and products with quantised weights")
    }
}
