//! `Weight`: a weight as a layer holds it, together with its token for gradient averaging.

use std::sync::Arc;

use candle_core::{Tensor, TensorId};
use ops::{PartMember, runs_in_part};

use super::Averaging;

/// A weight held by a layer that computes the weight's gradient itself.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    value: Tensor,
    /// Present where gradients are averaged over data-parallel replicas.
    averaged: Option<Arc<Averaged>>,
}

/// The token that stands for a parameter in graphs, and where to deliver its gradient.
#[derive(Debug)]
struct Averaged {
    token: Tensor,
    /// Index of the parameter.
    index: usize,
    averaging: Arc<Averaging>,
}

impl PartMember for Averaged {
    fn is_in(&self, _: TensorId) {
        self.averaging.used_in_part(self.index);
    }
}

impl Weight {
    /// `averaged` is the token, the parameter's index and the object that averages its gradients.
    pub(crate) fn new(value: Tensor, averaged: Option<(Tensor, usize, Arc<Averaging>)>) -> Self {
        let averaged =
            averaged.map(|(token, index, averaging)| Arc::new(Averaged { token, index, averaging }));
        Self { value, averaged }
    }

    /// Returns the values, detached from the graph.
    pub(crate) fn value(&self) -> Tensor {
        self.value.detach()
    }

    /// Returns the variable.
    pub(crate) fn variable(&self) -> &Tensor {
        &self.value
    }

    /// Returns the input of the layer's operation in the graph: the token, or the variable. Called when a layer runs.
    pub(crate) fn input(&self) -> &Tensor {
        if let Some(averaged) = &self.averaged {
            runs_in_part(&(averaged.clone() as Arc<dyn PartMember>));
        }
        self.node()
    }

    fn node(&self) -> &Tensor {
        self.averaged.as_ref().map_or(&self.value, |averaged| &averaged.token)
    }

    /// Returns whether it needs a gradient.
    pub(crate) fn has_gradient(&self) -> bool {
        self.node().track_op()
    }

    /// Returns the gradient that the operation reports for [`input`](Self::input), given that of the weight: delivers it and
    /// returns zeros for a token.
    pub(crate) fn gradient(&self, gradient: Tensor) -> candle_core::Result<Tensor> {
        let Some(averaged) = &self.averaged else { return Ok(gradient) };
        averaged.averaging.deliver(averaged.index, gradient)?;
        averaged.token.zeros_like()
    }
}
