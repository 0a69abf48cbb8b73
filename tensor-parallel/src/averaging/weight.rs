//! What layers have of a weight.

use std::sync::Arc;

use candle_core::{Tensor, TensorId};
use training::{PartMember, runs_in_part};

use super::Averaging;

/// A weight as a layer sees it that computes its gradient itself.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    value: Tensor,
    /// Where gradients are averaged.
    averaged: Option<Arc<Averaged>>,
}

/// What stands for a parameter in graphs, and leads to its gradient.
#[derive(Debug)]
struct Averaged {
    token: Tensor,
    /// The parameter's number.
    index: usize,
    averaging: Arc<Averaging>,
}

impl PartMember for Averaged {
    fn is_in(&self, _: TensorId) {
        self.averaging.used_in_part(self.index);
    }
}

impl Weight {
    /// `averaged` is the token, the parameter's number and what averages its gradients.
    pub(crate) fn new(value: Tensor, averaged: Option<(Tensor, usize, Arc<Averaging>)>) -> Self {
        let averaged =
            averaged.map(|(token, index, averaging)| Arc::new(Averaged { token, index, averaging }));
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

    /// What an operation has as its input, when a layer runs.
    pub(crate) fn input(&self) -> &Tensor {
        if let Some(averaged) = &self.averaged {
            runs_in_part(&(averaged.clone() as Arc<dyn PartMember>));
        }
        self.node()
    }

    fn node(&self) -> &Tensor {
        self.averaged.as_ref().map_or(&self.value, |averaged| &averaged.token)
    }

    /// Whether it has a gradient.
    pub(crate) fn has_gradient(&self) -> bool {
        self.node().track_op()
    }

    /// What an operation answers as the gradient of that input, where the weight's is this one.
    pub(crate) fn gradient(&self, gradient: Tensor) -> candle_core::Result<Tensor> {
        let Some(averaged) = &self.averaged else { return Ok(gradient) };
        averaged.averaging.give(averaged.index, gradient)?;
        averaged.token.zeros_like()
    }
}
