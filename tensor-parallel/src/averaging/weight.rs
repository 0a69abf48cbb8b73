//! What layers have of a weight.

use std::sync::Arc;

use candle_core::Tensor;

use super::Averaging;

/// A weight as a layer sees it that computes its gradient itself.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    value: Tensor,
    /// Where gradients are averaged: the token, and the parameter's number.
    averaged: Option<(Tensor, usize, Arc<Averaging>)>,
}

impl Weight {
    pub(crate) fn new(value: Tensor, averaged: Option<(Tensor, usize, Arc<Averaging>)>) -> Self {
        Self { value, averaged }
    }

    /// Its numbers, outside of the graph.
    pub(crate) fn value(&self) -> Tensor {
        self.value.detach()
    }

    /// The variable.
    pub(crate) fn variable(&self) -> &Tensor {
        &self.value
    }

    /// What an operation has as its input.
    pub(crate) fn node(&self) -> &Tensor {
        self.averaged.as_ref().map_or(&self.value, |(token, ..)| token)
    }

    /// What an operation answers as the gradient of that input, where the weight's is this one.
    pub(crate) fn gradient(&self, gradient: Tensor) -> candle_core::Result<Tensor> {
        let Some((token, index, averaging)) = &self.averaged else { return Ok(gradient) };
        averaging.give(*index, gradient)?;
        token.zeros_like()
    }
}
