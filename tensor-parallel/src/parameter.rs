//! `Parameter`: one rank's part of a parameter, and how it is divided.

use std::sync::Arc;

use candle_core::Var;
use ops::tape::Guard;

use crate::Split;

/// One rank's part of a parameter.
#[derive(Debug, Clone)]
pub struct Parameter {
    pub(crate) name: String,
    pub(crate) var: Var,
    pub(crate) dims: Vec<usize>,
    pub(crate) split: Split,
    pub(crate) summed: bool,
    /// Present where ranks combine gradients of it: refuses a backward that is not the model's own.
    pub(crate) _guard: Option<Arc<Guard>>,
}

impl Parameter {
    /// Returns its name, which is PyTorch's for the layers that PyTorch has.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns this rank's part, which an optimizer changes.
    pub fn var(&self) -> &Var {
        &self.var
    }

    /// Returns the shape of the whole parameter.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Returns how it is divided.
    pub fn split(&self) -> Split {
        self.split
    }

    /// Returns true if each rank computes only a part of the gradient, from its part of the sequence or from its attention
    /// heads, so that the gradients must be summed over ranks.
    pub(crate) fn is_summed(&self) -> bool {
        self.summed
    }

    pub(crate) fn describe(&self) -> String {
        let Self { name, var, dims, split, summed, .. } = self;
        format!(
            "parameter {name} {dims:?} {:?}, {split:?}{}",
            var.dtype(),
            if *summed { ", summed" } else { "" }
        )
    }
}
