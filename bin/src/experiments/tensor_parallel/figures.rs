//! What a rank measures: memory by kind, bytes sent, time.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{Communicator, all_gather_object};
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// The figures of row 21, of the rank that has the most of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Bytes of its parameters.
    pub weights: u64,
    /// Bytes of their gradients.
    pub gradients: u64,
    /// Bytes of what the optimizer remembers.
    pub optimizer: u64,
    /// The most memory that its process has held, in bytes, where known.
    pub peak_rss: Option<u64>,
    /// Bytes that it sends in a step.
    pub sent: f64,
    /// Seconds of a step.
    pub step_s: f64,
}

impl Figures {
    /// All that is for the model.
    pub fn model(&self) -> u64 {
        self.weights + self.gradients + self.optimizer
    }

    /// The largest of each over all ranks, on every rank.
    pub(super) fn largest(self, comm: &dyn Communicator) -> Result<Self> {
        let all = all_gather_object(comm, &self)?;
        Ok(all.into_iter().fold(Figures::default(), |a, b| Figures {
            weights: a.weights.max(b.weights),
            gradients: a.gradients.max(b.gradients),
            optimizer: a.optimizer.max(b.optimizer),
            peak_rss: a.peak_rss.max(b.peak_rss),
            sent: a.sent.max(b.sent),
            step_s: a.step_s.max(b.step_s),
        }))
    }
}

/// Bytes of tensors.
pub(super) fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    tensors.into_iter().map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64).sum()
}

/// Bytes of the gradients of these variables.
pub(super) fn gradient_bytes(vars: &[Var], gradients: &GradStore) -> u64 {
    bytes(vars.iter().filter_map(|var| gradients.get(var)))
}
